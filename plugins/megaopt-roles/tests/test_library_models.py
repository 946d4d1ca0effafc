"""Models of transformers, timm and peft: every parameter is seen for what it is, with its view, and surely."""

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).parent))

from library_models import REAL
from library_roles import EXPECTED

from megaopt_core.params import MatrixView, Role
from megaopt_core.routing import infer_roles

IDS, IMAGES = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 3, 32, 32)
EXAMPLES = {
    "t5": {"input_ids": IDS, "decoder_input_ids": IDS},
    "whisper": {"input_features": torch.zeros(2, 8, 40), "decoder_input_ids": IDS},
    "vit": {"pixel_values": IMAGES},
    "vit_timm": IMAGES,
    "resnet": IMAGES,
}


def seen(name: str, *, with_batch: bool) -> dict[str, Role | MatrixView | str]:
    """Return what the parameters of a model are, "doubt" where that is in doubt."""
    with torch.device("meta"):
        model = REAL[name]()
    example = EXAMPLES.get(name, {"input_ids": IDS}) if with_batch else None
    found = infer_roles(model, example=example, no_forward="" if with_batch else "none is asked for")
    return {
        param: "doubt"
        if decision.doubt == "role"
        else (decision.view if decision.role is Role.MATRIX else decision.role)
        for param, decision in found.items()
    }


def expected(name: str, params: dict[str, Role | MatrixView | str]) -> dict[str, Role | MatrixView]:
    """Return what they are to be: exactly one rule is of each that has several dimensions."""
    rules = EXPECTED[name]
    matching = {param: [rule for rule in rules if fnmatchcase(param, rule)] for param in params}
    assert {rule for found in matching.values() for rule in found} == set(rules)
    assert all(len(found) < 2 for found in matching.values())
    return {param: rules[found[0]] if found else Role.ELEMENTWISE for param, found in matching.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_batch_shows_every_role_and_view(name):
    """None is in doubt."""
    found = seen(name, with_batch=True)
    assert found == expected(name, found)


@pytest.mark.parametrize("name", EXPECTED)
def test_without_a_batch_no_role_is_wrong(name):
    """Hidden matrices are matrices; the views of fused ones are not known."""
    found = seen(name, with_batch=False)
    roles = {p: "matrix" if isinstance(what, MatrixView) else what for p, what in found.items()}
    right = {
        p: "matrix" if isinstance(what, MatrixView) else what for p, what in expected(name, found).items()
    }
    assert roles == right
