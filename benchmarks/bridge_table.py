"""The conformance kit on classes of other packages: what passes, what fails, what is refused and why.

    python benchmarks/bridge_table.py                     # every class of every source that is installed
    python benchmarks/bridge_table.py po torch:NAdam      # one source, and one class
    python benchmarks/bridge_table.py --page docs/bridge-classes.md

Every class runs in a process of its own, for at most four minutes, two classes at a time (`--jobs`). What is in the
results with the same versions is left as it is, check by check, unless `--again` is given: what was interrupted, or
ended by `--minutes`, goes on where it was, and of a kit that has grown only the new checks are made.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from megaopt_bridge import SOURCES
from megaopt_bridge.names import optimizers_of
from megaopt_testing import CHECKS, CheckResult, run_checks

from megaopt_core.errors import MegaoptError
from megaopt_core.registry import get_registry

RESULTS = Path(__file__).parent / "results" / "bridge.json"
LIMIT = 240.0
"""Seconds that a class may take."""
LR = 0.01
"""Learning rate, where a class has no larger one of its own; `learns` may take ten or a hundred times that."""

type Found = dict[str, Any]


def class_names(source: str) -> list[str]:
    """Return the names of a source's optimizer classes, as users would write them.

    Args:
        source: a key of `SOURCES`; what is not installed has none.
    """
    if not installed(source):
        return []
    found = {
        cls.__name__
        for cls in optimizers_of(SOURCES[source]).values()
        if cls.__module__.partition(".")[0] == SOURCES[source].package and not cls.__name__.startswith("_")
    }
    return [f"{source}:{name}" for name in sorted(found, key=str.lower)]


def installed(source: str) -> str | None:
    """Return the version of a source's distribution, None where it is not installed.

    Args:
        source: a key of `SOURCES`.
    """
    try:
        return version(SOURCES[source].distribution)
    except PackageNotFoundError:
        return None


def versions_for(name: str) -> dict[str, str]:
    """Return the versions that what comes of a class depends on.

    Args:
        name: `source:Class`.
    """
    sources = {"torch", name.partition(":")[0]}
    return {SOURCES[source].distribution: version(SOURCES[source].distribution) for source in sorted(sources)}


def compile_nothing() -> None:
    """Turn heavyball's compiler off: it takes minutes a class here, for every shape anew, and steps the same."""
    heavyball = sys.modules.get("heavyball")
    if heavyball is not None:
        heavyball.utils.compile_mode = None


def checked(name: str, ids: Sequence[str]) -> Found:
    """Return what came of one class.

    Args:
        name: `source:Class`.
        ids: the checks that are made.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    compile_nothing()
    begin = time.process_time()
    try:
        entry = get_registry().optimizer(name)
    except MegaoptError as error:
        return {"refused": str(error).partition("cannot be used: ")[2] or str(error)}
    probed = time.process_time() - begin
    own = inspect.signature(entry.load_class()).parameters.get("lr")
    lr = max(LR, own.default) if own is not None and isinstance(own.default, float) else LR
    results = run_checks(name, checks=[check for check in CHECKS if check.id in ids], lr=lr)
    results = [
        result if result.ok or result.id != "learns" else learns(name, lr, result) for result in results
    ]
    return {
        "granularity": entry.granularity.value,
        "alignment": entry.alignment,
        "matrices": entry.accepts is not None,
        "probe_seconds": round(probed, 2),
        "seconds": round(time.process_time() - begin, 1),
        "checks": {result.id: result.status.value for result in results},
        "messages": {result.id: result.message for result in results if not result.ok},
    }


def learns(name: str, lr: float, failed: CheckResult) -> CheckResult:
    """Return a result at the first larger learning rate at which a class learns, else the one that there is.

    Args:
        name: `source:Class`.
        lr: at which it does not.
        failed: what came of that.
    """
    check = [check for check in CHECKS if check.id == failed.id]
    for factor in (10.0, 100.0):
        (result,) = run_checks(name, checks=check, lr=factor * lr)
        if result.ok:
            return result
    return failed


def missing(name: str, found: Found | None) -> list[str]:
    """Return the checks that are to be made of a class, in their order; none of one that was refused.

    Args:
        name: `source:Class`.
        found: what is known of it; None: nothing.
    """
    if found is None or found.get("versions") != versions_for(name):
        return [check.id for check in CHECKS]
    if "refused" in found or "error" in found:
        return []
    return [check.id for check in CHECKS if check.id not in found["checks"]]


def joined(name: str, before: Found | None, found: Found) -> Found:
    """Return what is known of a class with what was found now.

    Args:
        name: `source:Class`.
        before: what was known; None: nothing.
        found: the result of some checks, or why there is none.
    """
    versions = versions_for(name)
    if before is None or before.get("versions") != versions or not ("checks" in before and "checks" in found):
        return {"versions": versions, **found}
    status = {**before["checks"], **found["checks"]}
    told = {
        **{id_: why for id_, why in before["messages"].items() if id_ not in found["checks"]},
        **found["messages"],
    }
    order = [check.id for check in CHECKS if check.id in status]
    return {
        **before,
        **found,
        "seconds": round(before["seconds"] + found["seconds"], 1),
        "checks": {id_: status[id_] for id_ in order},
        "messages": {id_: told[id_] for id_ in order if id_ in told},
    }


@frozen(eq=False)
class Child:
    """A process that checks one class.

    Args:
        name: `source:Class`.
        process: the process.
        answer: where its answer comes from.
        deadline: when it is given up.
    """

    name: str
    process: Any
    answer: Connection
    deadline: float

    @classmethod
    def start(cls, name: str, ids: Sequence[str]) -> Child:
        """Start one.

        Args:
            name: `source:Class`.
            ids: the checks.
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_in_child, args=(name, ids, theirs))
        with warnings.catch_warnings():
            # Threads of torch's pools are waiting; the child computes with one thread, its own.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
            process.start()
        theirs.close()
        return cls(name, process, ours, time.monotonic() + LIMIT)

    def result(self) -> Found:
        """Return what it found, or why it found nothing, and end it."""
        try:
            return self.answer.recv() if self.answer.poll() else {"error": f"not done after {LIMIT:g} s"}
        except EOFError:
            return {"error": "its process ended without a word"}
        finally:
            self.process.kill()
            self.process.join()


def _in_child(name: str, ids: Sequence[str], answer: Connection) -> None:
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - the process ends with it
    try:
        answer.send(checked(name, ids))
    except BaseException as error:  # noqa: BLE001 - a class may do anything
        answer.send({"error": f"{type(error).__name__}: {error}"})


def in_turn(asked: Mapping[str, Sequence[str]], jobs: int, end: float) -> Iterator[tuple[str, Found]]:
    """Check classes, some at a time, and yield what came of each when it is there.

    Args:
        asked: class to the checks that are made of it.
        jobs: how many at a time.
        end: by `time.monotonic()`; none is begun after it.
    """
    left, running = list(asked), list[Child]()
    while running or (left and time.monotonic() < end):
        while left and len(running) < jobs and time.monotonic() < end:
            name = left.pop(0)
            running.append(Child.start(name, asked[name]))
        first = min(child.deadline for child in running)
        ready = wait([child.answer for child in running], timeout=max(first - time.monotonic(), 0.0))
        done = [child for child in running if child.answer in ready or time.monotonic() >= child.deadline]
        for child in done:
            running.remove(child)
            yield child.name, child.result()


def main() -> None:
    """Check classes, or write the page of what came of them."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(SOURCES), help="sources (po) or classes (po:ADOPT)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file that is read and written")
    parser.add_argument("--jobs", type=int, default=2, help="classes at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no class after these")
    parser.add_argument("--again", action="store_true", help="check what was checked already, too")
    parser.add_argument("--without", nargs="*", default=[], help="checks that are left for another time")
    parser.add_argument("--page", type=Path, help="write the page of the results instead")
    args = parser.parse_args()
    known = json.loads(args.results.read_text()) if args.results.exists() else {"classes": {}}
    if args.page is not None:
        from bridge_page import page

        args.page.write_text(page(known))
        return
    classes = known["classes"]
    asked = [name for given in args.names for name in ([given] if ":" in given else class_names(given))]
    wanted = {name: missing(name, None if args.again else classes.get(name)) for name in asked}
    wanted = {name: [id_ for id_ in ids if id_ not in args.without] for name, ids in wanted.items()}
    wanted = {name: ids for name, ids in wanted.items() if ids}
    print(f"{len(asked)} classes, {len(wanted)} to be checked", flush=True)
    for name, found in in_turn(wanted, args.jobs, time.monotonic() + 60 * args.minutes):
        classes[name] = joined(name, classes.get(name), found)
        failed = list(found.get("messages", {}))
        told = found.get("refused", found.get("error", failed))
        print(name, found.get("granularity", ""), found.get("seconds", ""), told, flush=True)
        ordered = dict(sorted(classes.items(), key=lambda item: item[0].lower()))
        text = json.dumps({"python": platform.python_version(), "classes": ordered}, indent=1)
        args.results.write_text(text + "\n")


if __name__ == "__main__":
    main()
