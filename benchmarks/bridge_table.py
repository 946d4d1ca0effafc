"""The conformance kit on classes of other packages: what passes, what fails, what is refused and why.

    python benchmarks/bridge_table.py po torch --out benchmarks/results/bridge.json
    python benchmarks/bridge_table.py --page docs/bridge-classes.md

Every class runs in a process of its own, for at most four minutes.
"""

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "bridge.json"
LIMIT = 240
LR = 0.01


def class_names(source: str) -> list[str]:
    """Return the names of a source's optimizer classes, as users would write them."""
    import torch
    from megaopt_bridge import SOURCES
    from megaopt_bridge.names import optimizers_of

    found = {
        cls.__name__: cls
        for cls in optimizers_of(SOURCES[source]).values()
        if cls.__module__.partition(".")[0] == SOURCES[source].package and not cls.__name__.startswith("_")
    }
    assert torch.optim.Optimizer not in found.values()
    return [f"{source}:{name}" for name in sorted(found, key=str.lower)]


def checked(name: str) -> dict[str, object]:
    """Return what came of one class."""
    import torch
    from megaopt_testing import run_checks

    from megaopt_core.errors import MegaoptError
    from megaopt_core.registry import get_registry

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    try:
        entry = get_registry().optimizer(name)
    except MegaoptError as error:
        return {"refused": str(error).partition("cannot be used: ")[2] or str(error)}
    probed = time.perf_counter() - begin
    own = inspect.signature(entry.load_class()).parameters.get("lr")
    lr = max(LR, own.default) if own is not None and isinstance(own.default, float) else LR
    results = run_checks(name, lr=lr)
    return {
        "granularity": entry.granularity.value,
        "alignment": entry.alignment,
        "matrices": entry.accepts is not None,
        "probe_seconds": round(probed, 2),
        "seconds": round(time.perf_counter() - begin, 1),
        "checks": {result.id: result.status.value for result in results},
        "messages": {result.id: result.message for result in results if not result.ok},
    }


def _in_child(name: str, channel: "multiprocessing.connection.Connection") -> None:
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - the process ends with it
    try:
        channel.send(checked(name))
    except BaseException as error:  # noqa: BLE001 - a class may do anything
        channel.send({"error": f"{type(error).__name__}: {error}"})


def run_one(name: str) -> dict[str, object]:
    """Check a class in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(name, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT) else {"error": f"not done after {LIMIT} s"}
    except EOFError:
        return {"error": "its process ended without a word"}
    finally:
        child.kill()
        child.join()


def _known() -> dict[str, dict[str, object]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "classes": {}}


def main() -> None:
    """Check classes, or write the page of what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="sources (po) or classes (po:ADOPT)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the page of the results instead")
    args = parser.parse_args()
    if args.page is not None:
        from bridge_page import page

        args.page.write_text(page(json.loads(args.out.read_text())))
        return
    from megaopt_bridge import SOURCES

    names = [name for given in args.names for name in ([given] if ":" in given else class_names(given))]
    results = _known()
    results["python"] = platform.python_version()
    for name in names:
        source = SOURCES[name.partition(":")[0]]
        results["versions"][source.distribution] = version(source.distribution)
        found = run_one(name)
        results["classes"][name] = found
        failed = list(found.get("messages", {}))
        print(
            name, found.get("granularity", ""), found.get("refused", found.get("error", failed)), flush=True
        )
        results["classes"] = dict(sorted(results["classes"].items(), key=lambda item: item[0].lower()))
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
