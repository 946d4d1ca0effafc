"""Compare the decisions of the roles plugin with stored ones, with a batch and without.

    python benchmarks/compare_roles.py torchvision timm transformers diffusers peft own [--only NAME] [--part 0 2]

`role_data/LIBRARY.json.xz` holds what a reader of sources, which is gone, decided for every model of
`library_models.py`; `role_data/verdicts.json` says who was right wherever the two differ, and why. A decision counts as
right when it is what the verdict says, or what is stored where there is no verdict. Views count: a matrix that is seen
as other matrices is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from library_batches import batches
from library_models import LIBRARIES
from store_roles import DATA, decision_text, expand
from torch import nn

from megaopt_core.params import RoleDecision

__all__ = ["Verdicts", "compare", "load"]

type Reader = Callable[[nn.Module, Any], tuple[bool, Mapping[str, RoleDecision]]]
"""Takes a model and a batch, or None; returns whether a forward was watched, and decisions by name."""


def load(library: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the stored decisions: model, then parameter, then shape and decision."""
    found = json.loads(lzma.decompress((DATA / f"{library}.json.xz").read_bytes()))["models"]
    return {
        model: {
            name: (shape, text)
            for row in rows
            for names, shape, text in [row.split(" | ")]
            for name in expand(names)
        }
        for model, rows in found.items()
    }


class Verdicts:
    """What was judged by hand: rules by library, model and parameter, the first that fits decides."""

    def __init__(self) -> None:
        path = DATA / "verdicts.json"
        self._rules = json.loads(path.read_text()) if path.exists() else []

    def truth(self, library: str, model: str, name: str, shape: str, stored: str) -> list[str] | None:
        """Return what a decision may be; None where nobody can say."""
        for rule in self._rules:
            if not fnmatchcase(library, rule["library"]) or not any(
                fnmatchcase(stored, s) for s in _many(rule.get("stored", "*"))
            ):
                continue
            if any(fnmatchcase(model, m) for m in _many(rule["models"])) and any(
                fnmatchcase(name, n) for n in _many(rule["params"])
            ):
                said = rule["truth"]
                return None if said == "open" else [stored if one == "stored" else one for one in _many(said)]
        return [stored]


def _many(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def certain(text: str) -> str:
    """Return a decision without its doubts."""
    return text.replace("?", "").replace("~", "")


def compare(
    said: Mapping[str, RoleDecision],
    stored: Mapping[str, tuple[str, str]],
    truth: Callable[..., list[str] | None],
    reached: set[str],
) -> tuple[Counter[str], list[tuple[str, str, str, str, str]]]:
    """Return counts, and every parameter that is not right and certain: name, shape, stored, said, reason."""
    counts, wrong = Counter[str](), []
    for name, decision in said.items():
        text = decision_text(decision)
        shape, before = stored.get(name, ("", "elementwise"))
        if name not in stored and text == "elementwise":
            continue
        if name not in reached:
            counts["not reached by the batch"] += 1
            continue
        allowed = truth(name, shape, before)
        if allowed is None:
            counts["open"] += 1
            continue
        roles = {certain(one).split(" ")[0] for one in allowed}
        right = any(fnmatchcase(certain(text), certain(one)) for one in allowed)
        role = certain(text).split(" ")[0] in roles
        doubt = "doubtful" if "?" in text else "view doubtful" if "~" in text else "certain"
        counts[f"{'right' if right else 'wrong view' if role else 'wrong'}, {doubt}"] += 1
        hidden = "hidden " if roles == {"matrix"} else ""
        if hidden:
            counts[f"hidden {'right' if right else 'wrong view' if role else 'wrong'}, {doubt}"] += 1
        if text.startswith("matrix") and "?" not in text and roles & {"embedding", "output"} and not role:
            counts["ends to a matrix optimizer as certain"] += 1
        if not right or doubt != "certain":
            wrong.append((name, shape, before, text, decision.reason))
    return counts, wrong


def meet(library: str, reader: Reader, args: argparse.Namespace) -> dict[str, Any]:
    """Read every model of a library in both ways; return counts, times and what differs."""
    stored, verdicts = load(library), Verdicts()
    total = {"batch": Counter[str](), "none": Counter[str]()}
    rows: dict[str, list[Any]] = {"batch": [], "none": []}
    unread: dict[str, str] = {}
    for i, (name, build) in enumerate(LIBRARIES[library]()):
        if i % args.part[1] != args.part[0] or name not in stored or args.only not in name:
            continue
        start, ran = time.process_time(), False
        signal.alarm(args.limit)
        try:
            with torch.device("meta"):
                model = build().eval()
            truth = lambda *given, name=name: verdicts.truth(library, name, *given)  # noqa: E731
            said = reader(model, None)[1]
            if _is_another(model, stored[name]):
                unread[name] = "another model of the same name is stored"
                continue
            counts, wrong = compare(said, stored[name], truth, set(said))
            total["none"] += counts
            rows["none"] += [(name, *row) for row in wrong]
            why = ""
            with _reached(model) as reached:
                for batch in batches(model):
                    reached.clear()
                    ran, said = reader(model, batch)
                    if ran:
                        counts, wrong = compare(said, stored[name], truth, reached)
                        total["batch"] += counts
                        rows["batch"] += [(name, *row) for row in wrong]
                        break
                    why = why or str(said)[:200]
            if not ran:
                unread[name] = why
        except (Exception, _TookTooLongError) as error:  # noqa: BLE001 - the others go on
            unread[name] = f"{type(error).__name__}: {str(error)[:150]}"
            if args.trace:
                traceback.print_exc()
        finally:
            signal.alarm(0)
        total["none"]["models"] += 1
        total["batch"]["models"] += ran
        print(
            f"{library} {i} {name} {time.process_time() - start:.1f} s {'' if ran else unread.get(name)}",
            flush=True,
        )
    return {"counts": {key: dict(value) for key, value in total.items()}, "rows": rows, "unread": unread}


def _is_another(model: nn.Module, stored: Mapping[str, tuple[str, str]]) -> bool:
    """Return whether the shapes of a model are not those that are stored under its name."""
    shapes = {name: "x".join(map(str, param.shape)) for name, param in model.named_parameters()}
    return any(shapes.get(name) != shape for name, (shape, _) in stored.items())


@contextlib.contextmanager
def _reached(model: nn.Module) -> Iterator[set[str]]:
    """Collect the parameters of the modules that a forward calls, and of their children that are layers.

    A condition on a tensor without values (is anything masked?) is false meanwhile, as in a model that has no padding.
    """
    found = set[str]()
    handles = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)}
        for part, child in module.named_children():
            if not any(True for _ in child.children()):
                own |= {f"{path}.{part}.{name}".lstrip(".") for name, _ in child.named_parameters()}
        handles.append(module.register_forward_pre_hook(lambda *_, own=own: found.update(own)))
    try:
        with mock.patch.object(torch.Tensor, "__bool__", return_value=False):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def read_installed(model: nn.Module, batch: Any) -> tuple[bool, Any]:
    """Read with what is installed; without a batch no forward is run, not even with one that a library brings."""
    from megaopt_roles.reading import read_roles

    if batch is None:
        return True, read_roles(model, no_forward="not asked")
    said = read_roles(model, batch)
    why = next((decision.no_forward for decision in said.values() if decision.no_forward), "")
    return (False, why) if why else (True, said)


class _TookTooLongError(BaseException):
    """A model took too long; nothing inside of it catches this."""


def _stop(*_: Any) -> None:
    raise _TookTooLongError


def main(reader: Reader = read_installed) -> None:
    """Compare, print, and write what differs to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", choices=LIBRARIES)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=int, default=180, help="seconds for a model")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--out", type=Path, help="a file for what differs, as JSON")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    for library in args.libraries:
        found = meet(library, reader, args)
        for mode, counts in found["counts"].items():
            print(library, mode, counts)
        if args.out:
            args.out.mkdir(exist_ok=True)
            path = args.out / f"{library}.{args.part[0]}.json"
            path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
