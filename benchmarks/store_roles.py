"""Store what the roles plugin decides for library models, so that another reader can be compared with it.

    python benchmarks/store_roles.py torchvision timm transformers diffusers peft own

Decisions stand in `role_data/LIBRARY.json.xz`: a model, then rows of parameters that are decided alike. Every parameter
that has fewer than two sides longer than 1 is left out where it is element-wise and certain, as all of them should be.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from library_models import LIBRARIES

from megaopt_core.params import Doubt, MatrixView, RoleDecision
from megaopt_core.routing import infer_roles

__all__ = ["decision_text", "expand", "merged", "view_text"]

DATA = Path(__file__).parent / "role_data"


def view_text(view: MatrixView | None) -> str:
    """Return a view in one word: its fields that are not the default."""
    if view is None:
        return ""
    parts = [f"batch{view.batch_dims}"] if view.batch_dims else []
    parts += ["transposed"] if view.transposed else []
    parts += [f"first{view.first_dims}"] if view.first_dims != 1 else []
    parts += (
        [f"{'columns' if view.split_dim else 'rows'}:{','.join(map(str, view.split_sizes))}"]
        if view.split_sizes
        else []
    )
    return " ".join(parts)


def decision_text(decision: RoleDecision) -> str:
    """Return a decision in one line: role, `?` for a doubt of the role and `~` for one of the view, and the view."""
    mark = {Doubt.NONE: "", Doubt.ROLE: "?"}.get(decision.doubt, "~")
    return f"{decision.role}{mark} {view_text(decision.view)}".strip()


def merged(names: list[str]) -> list[str]:
    """Return names with those that differ in one number alone written as one: `layers.{0,1}.weight`."""
    split = [tuple(re.split(r"(\d+)", name)) for name in names]
    longest = max(len(parts) for parts in split)
    for slot in range(1, longest, 2):
        found: dict[tuple[str, ...], list[str]] = {}
        for parts in split:
            if slot < len(parts):
                found.setdefault((*parts[:slot], "", *parts[slot + 1 :]), []).append(parts[slot])
            else:
                found.setdefault(parts, [""])
        split = [
            key if values == [""] else (*key[:slot], _set(values), *key[slot + 1 :])
            for key, values in found.items()
        ]
    return ["".join(parts) for parts in split]


def _set(values: list[str]) -> str:
    return values[0] if len(values) == 1 else "{" + ",".join(dict.fromkeys(values)) + "}"


def expand(text: str) -> list[str]:
    """Return the names that `merged` wrote as one."""
    match = re.search(r"\{([^}]*)\}", text)
    if match is None:
        return [text]
    rest = expand(text[match.end() :])
    return [text[: match.start()] + value + tail for value in match[1].split(",") for tail in rest]


def rows_of(model: torch.nn.Module, decisions: dict[str, RoleDecision]) -> list[str]:
    """Return the decisions of a model, parameters that are decided alike in one row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for name, decision in decisions.items():
        shape, text = shapes[name], decision_text(decision)
        if sum(size > 1 for size in shape) < 2 and text == "elementwise":
            continue
        key = re.sub(r"\d+", "#", name), "x".join(map(str, shape)), text
        groups.setdefault(key, []).append(name)
    rows = []
    for (_, shape, text), names in groups.items():
        assert sorted(n for m in merged(names) for n in expand(m)) == sorted(names), names
        rows.extend(f"{one} | {shape} | {text}" for one in merged(names))
    return rows


def _stop(*_: Any) -> None:
    raise TimeoutError("took over two minutes")


def main() -> None:
    """Read every model and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", choices=LIBRARIES)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    for library in args.libraries:
        found: dict[str, list[str]] = {}
        failed: dict[str, str] = {}
        for i, (name, build) in enumerate(LIBRARIES[library]()):
            start = time.process_time()
            signal.alarm(120)
            try:
                with torch.device("meta"):
                    model = build().eval()
                found[name] = rows_of(model, infer_roles(model))
            except Exception as error:  # noqa: BLE001 - some need what is not installed
                failed[name] = f"{type(error).__name__}: {str(error)[:100]}"
            finally:
                signal.alarm(0)
            print(
                f"{library} {i} {name} {time.process_time() - start:.1f} s {failed.get(name, '')}", flush=True
            )
        text = json.dumps({"models": found, "failed": failed}, indent=0)
        (args.out / f"{library}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    main()
