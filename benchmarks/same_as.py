"""Compares this tree with an older commit: the same gradients make the same bits, and the same collectives.

    python benchmarks/same_as.py [--only TEXT] [--old COMMIT] [--processes 2]

Both trees run every case of `same_as_cases.py`, this one as it is installed here, the old one from a worktree that is
installed beside it with the same torch. Results, parameters, states and group settings must be equal bit for bit, and
what each rank sends in each step, in its order. `same_as_differences.toml` lists each difference that is allowed, with
its reason; a line there that no case needs any more is an error. Ends with 0 where everything is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

OLD_COMMIT = "4d8886d2"
"""The last commit before code began to move out of the core."""

ROOT = Path(__file__).parents[1]
DIFFERENCES = Path(__file__).with_name("same_as_differences.toml")

WORKER = Path(__file__).with_name("same_as_worker.py")


def install_old(commit: str, folder: Path) -> Path:
    """Install core and plugins of a commit into a folder, without what they depend on; return the folder.

    Args:
        commit: which.
        folder: where its worktree and what is installed go.
    """
    tree, target = folder / "tree", folder / "site"
    subprocess.run(
        ["git", "worktree", "add", "--detach", "--force", tree, commit],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    try:
        distributions = [tree, *sorted(path.parent for path in tree.glob("plugins/megaopt-*/src"))]
        command = _installer()
        subprocess.run(
            [*command, "--no-deps", "--target", target, *distributions],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    finally:
        subprocess.run(
            ["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True, capture_output=True
        )
    return target


def _installer() -> list[str]:
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet"]


def run_cases(
    which: str, site: Path | None, folder: Path, checkpoints: Path, only: str, processes: int
) -> dict[str, dict[str, Any]]:
    """Run all cases with one tree; return case name to what each rank recorded, and the words of an expected refusal.

    Args:
        which: `"old"` or `"new"`.
        site: where the tree is installed; None: in this environment.
        folder: where records go.
        checkpoints: where the old tree saves and both load.
        only: run cases whose name has this text.
        processes: how many cases run at a time.
    """
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, WORKER, folder, checkpoints, which, only]
    shares = [[*map(str, command), str(share), str(processes)] for share in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda share: subprocess.run(share, env=environment, cwd=folder, check=True), shares))
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {record["name"]: record for record in records}


def surprises(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a line for every case that is refused and should run, or the other way round.

    Args:
        records: what :func:`run_cases` returned.
    """
    lines = []
    for name, record in records.items():
        firsts = [entries[0] if entries else ["nothing", ""] for entries in record["ranks"]]
        refusal = record["refusal"]
        fits = all(
            (kind == "raised" and refusal in words) if refusal else kind == "step"
            for kind, words, *_ in firsts
        )
        if not fits:
            lines.append(f"{name}: expected {refusal or 'steps'!r}, got {firsts[0][:2]}")
    return lines


def differences(old: list[Any], new: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and words of each first difference between what two trees recorded in one case.

    Args:
        old: for each rank, its entries.
        new: the same of this tree.
    """
    for rank, (before, after) in enumerate(zip(old, new, strict=False)):
        if len(before) != len(after):
            yield (
                "steps",
                f"rank {rank}: {len(before)} entries, now {len(after)}: {_last(before)}; now {_last(after)}",
            )
        for step, (was, now) in enumerate(zip(before, after, strict=False)):
            where = f"rank {rank}, step {step}"
            if was[0] != "step" or now[0] != "step":
                if was != now:
                    yield "raised", f"{where}: {was[:2]}; now {now[:2]}"
                continue
            if was[1] != now[1]:
                yield "result", f"{where}: {was[1]}; now {now[1]}"
            changed = [name for name in {**was[2], **now[2]} if was[2].get(name) != now[2].get(name)]
            if changed:
                first = changed[0]
                yield (
                    "values",
                    f"{where}: {len(changed)} values, {first}: {was[2].get(first)}; now {now[2].get(first)}",
                )
            for sent, sends in _unlike(was[3], now[3]):
                yield "collectives", f"{where}: {sent}; now {sends}"
    if len(old) != len(new):
        yield "ranks", f"{old}; now {new}"


def _unlike(was: list[str], now: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what a step sent, and what it sends in its place, once each."""
    pairs = zip(was, now, strict=True) if len(was) == len(now) else [(str(was), str(now))]
    yield from dict.fromkeys((sent, sends) for sent, sends in pairs if sent != sends)


def _last(entries: list[Any]) -> str:
    return str(entries[-1][:2]) if entries else "nothing"


def unlisted(
    found: Mapping[str, list[tuple[str, str]]], allowed: list[dict[str, str]], names: list[str]
) -> tuple[list[str], list[str]]:
    """Return a line for every difference that no line of the file allows, and for every line that allows none.

    Args:
        found: case to its differences.
        allowed: the file's entries: `case` (a pattern), `kind`, `words` (a pattern of the difference), `reason`.
        names: every case that was run.
    """
    used: Counter[int] = Counter()
    lines = []
    for name, each in found.items():
        for kind, words in each:
            fits = [
                index
                for index, line in enumerate(allowed)
                if line["kind"] == kind and re.search(line["case"], name) and re.search(line["words"], words)
            ]
            used.update(fits)
            if not fits:
                lines.append(f"{name}: {kind}: {words}")
    idle = [
        f"{line['case']!r} ({line['kind']}): no case differs so"
        for index, line in enumerate(allowed)
        if not used[index] and any(re.search(line["case"], name) for name in names)
    ]
    return lines, idle


def main() -> int:
    """Run both trees, compare, print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--old", default=OLD_COMMIT, help="the commit to compare with")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="cases at a time")
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site, checkpoints = install_old(args.old, folder), folder / "checkpoints"
        checkpoints.mkdir()
        old = run_cases("old", site, folder / "old", checkpoints, args.only, args.processes)
        new = run_cases("new", None, folder / "new", checkpoints, args.only, args.processes)
    allowed = tomllib.loads(DIFFERENCES.read_text())["difference"]
    found = {case: list(differences(old[case]["ranks"], new[case]["ranks"])) for case in old}
    lines, idle = unlisted(found, allowed, list(old))
    lines += surprises(old)
    print("\n".join([*lines, *idle]))
    differing = sum(map(bool, found.values()))
    print(f"{len(old)} cases, {differing} with allowed or other differences, {len(lines)} lines not allowed, "
          f"{len(idle)} idle lines, {time.monotonic() - begin:.0f} s")  # fmt: skip
    return 1 if lines or idle or not old else 0


if __name__ == "__main__":
    sys.exit(main())
