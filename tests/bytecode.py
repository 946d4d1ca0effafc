"""Let the environments of tox share what Python compiles of their packages: torch takes seconds in every new one.

    python tests/bytecode.py take .tox/bytecode    # before the tests
    python tests/bytecode.py give .tox/bytecode    # after them

uv links one file of its cache into every environment. Bytecode belongs to that very file, by its place on the disk:
other versions are other files, and a copy shares nothing.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

__all__ = ["give", "take"]


def _sources(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield each linked source file, where its bytecode belongs, and the name that the file has in the store."""
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".py"):
                source = Path(place, name)
                found = source.stat()
                if found.st_nlink > 1:
                    own = f"{found.st_dev}-{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
                    compiled = Path(cache_from_source(str(source)))
                    yield source, compiled, f"{own}-{compiled.name}"


def _names(store: Path) -> set[str]:
    return {entry.name for entry in store.iterdir()} if store.is_dir() else set()


def take(packages: Path, store: Path) -> int:
    """Link bytecode from the store into an environment; return of how many files.

    Args:
        packages: the environment's `site-packages`.
        store: a folder on the same disk.
    """
    known = _names(store)
    taken = 0
    for _, compiled, name in _sources(packages):
        if name in known and not compiled.exists():
            compiled.parent.mkdir(exist_ok=True)
            with suppress(OSError):
                os.link(store / name, compiled)
                taken += 1
    return taken


def give(packages: Path, store: Path) -> int:
    """Link an environment's bytecode into the store, where it has none yet; return of how many files.

    Args:
        packages: the environment's `site-packages`.
        store: a folder on the same disk.
    """
    store.mkdir(parents=True, exist_ok=True)
    known, given = _names(store), 0
    for source, compiled, name in _sources(packages):
        if name not in known and _is_of(compiled, source):
            with suppress(OSError):
                os.link(compiled, store / name)
                given += 1
    return given


def _is_of(compiled: Path, source: Path) -> bool:
    """Whether bytecode is there, and says that it is of this file: by time and size, as Python checks it."""
    try:
        header = compiled.read_bytes()[:16]
    except OSError:
        return False
    found = source.stat()
    times = (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
    return header[4:8] == bytes(4) and header[8:16] == b"".join(each.to_bytes(4, "little") for each in times)


def main() -> None:
    """Take or give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["take", "give"])
    parser.add_argument("store", type=Path)
    given = parser.parse_args()
    move = {"take": take, "give": give}[given.what]
    count = move(Path(sysconfig.get_path("purelib")), given.store)
    print(
        f"{count} compiled modules {'taken from' if given.what == 'take' else 'given to'} {given.store.name}"
    )


if __name__ == "__main__":
    main()
