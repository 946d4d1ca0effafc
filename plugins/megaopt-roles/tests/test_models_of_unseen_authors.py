"""Models by two authors who had the public pages and never saw the reader, with what each parameter is.

`unseen/` keeps them as they were written. An expectation is `(role, view)`; `"arguable"` stands behind it where two
answers can be defended, and those are not counted.
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaopt_core.params import MatrixView, RoleDecision
from megaopt_core.routing import infer_roles

FOLDER = Path(__file__).parent / "unseen"


def _models(author: str) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """Yield name, factory, factory of a batch (None: there is none) and expectations."""
    sys.path.insert(0, str(FOLDER / author))
    for path in sorted((FOLDER / author).glob("models_*.py")):
        spec = importlib.util.spec_from_file_location(f"unseen_{author}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield from module.MODELS
    sys.path.remove(str(FOLDER / author))


def _view(said: dict[str, Any] | None) -> MatrixView:
    said = said or {}
    return MatrixView(
        batch_dims=said.get("batch_dims", int(said.get("batched", False))),
        transposed=said.get("transposed", False),
        split_dim=said.get("dim", 0),
        split_sizes=tuple(said.get("sizes", ())),
        first_dims=said.get("first_dims", 1),
    )


def _judged(found: RoleDecision, role: str, view: dict[str, Any] | None) -> str:
    right = str(found.role) == role and (role != "matrix" or found.view == _view(view))
    if found.uncertain:
        return "doubtful"
    return "right" if right else "wrong view" if str(found.role) == role else "wrong"


def _counts(author: str, *, with_batch: bool) -> tuple[Counter[str], list[str]]:
    counts, ends = Counter[str](), []
    for name, factory, example, expected in _models(author):
        if with_batch and example is None:
            continue
        torch.manual_seed(0)
        found = infer_roles(factory(), example=example() if with_batch else None)
        for param, (role, view, *arguable) in expected.items():
            if arguable:
                continue
            judged = _judged(found[param], role, view)
            counts[judged] += 1
            if judged == "wrong" and str(found[param].role) == "matrix":
                ends.append(f"{name}: {param} ({role})")
    return counts, ends


@pytest.mark.parametrize("author", ["a", "b"])
def test_a_batch_shows_nearly_everything(author):
    """At least 97 % are right and certain, views too; under 0.5 % are wrong; no end of a model is a matrix."""
    counts, ends = _counts(author, with_batch=True)
    assert ends == []
    assert counts["right"] >= 0.97 * counts.total()
    assert counts["wrong"] < 0.005 * counts.total()


@pytest.mark.parametrize("author", ["a", "b"])
def test_without_a_batch_what_is_certain_is_right(author):
    """At most 1 in 100 is wrong and certain; most are certain by types and conventions."""
    counts, _ = _counts(author, with_batch=False)
    assert counts["wrong"] <= 0.01 * counts.total()
    assert counts["right"] >= 0.75 * counts.total()
