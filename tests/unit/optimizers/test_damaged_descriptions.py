"""What torch's checkpoints hold of an optimizer is a document of a stranger, too."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointVersionError,
    MegaoptError,
    StateDictError,
)
from megaopt_core.optimizers import MegatronOptimizer

ODD = [None, True, -1, 2.5, "nonsense", [], [1], {}, {"x": 1}]


@pytest.fixture
def stepped(mlp: Callable[..., nn.Module], build: Callable[..., MegatronOptimizer]) -> MegatronOptimizer:
    """Return an optimizer with state."""
    model = mlp()
    optimizer = build(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in a document with each of its keys."""
    for key in (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(value[key])


def test_every_place_of_a_description_may_hold_anything(stepped: MegatronOptimizer) -> None:
    """Each is refused by an error of ours with nothing changed, or makes no difference that could fail later."""
    saved = stepped.checkpoint_state().state_dict()
    described = json.loads(saved["description"])
    places = len(list(_places(described)))
    refused = 0
    for number in range(places):
        for odd in ODD:
            changed = json.loads(saved["description"])
            container, key = list(_places(changed))[number]
            container[key] = odd
            before = str(stepped.state_dict())
            try:
                stepped.checkpoint_state().load_state_dict({**saved, "description": json.dumps(changed)})
            except MegaoptError:
                refused += 1
                assert str(stepped.state_dict()) == before
            else:
                stepped.checkpoint_state().load_state_dict(saved)
    assert refused > places


@pytest.mark.parametrize(
    "text", ["", "nope", "null", "[]", "5", '{"version": 4}', '{"version": 4, "parameters": {}}', "[" * 10**5]
)
def test_what_is_no_description_is_damaged(stepped: MegatronOptimizer, text: str) -> None:
    """Also one that lacks what it must have."""
    saved = stepped.checkpoint_state().state_dict()
    with pytest.raises(CheckpointCorruptError, match=r"^the checkpoint: its description is "):
        stepped.checkpoint_state().load_state_dict({**saved, "description": text})


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("parameters", [], r"its description\.parameters is \[\], which is not an object"),
        ("plugins", {"t_adam": 1}, r"its description\.plugins\.t_adam is 1, which is not text"),
        (
            "parameters/0.weight/group",
            -1,
            r"parameters\.0\.weight\.group is -1, which is not one of \d groups",
        ),
        ("parameters/0.weight/group", True, r"group is True, which is not a whole number"),
        ("parameters/0.weight/optimizer", None, r"0\.weight\.optimizer is None, which is not text"),
        ("parameters/0.weight/shape", [2.5], r"0\.weight\.shape is \[2\.5\], which is not a shape"),
        ("parameters/0.weight/role", "matron", r"0\.weight\.role is 'matron', which is not one of"),
        ("parameters/0.weight/view", {"color": 1}, r"\{'color': 1\} is no view of a parameter as matrices"),
        (
            "parameters/0.weight/state/step",
            {"junk": 1},
            r"state\.step is \['junk'\], which is not an object of",
        ),
        ("groups/0/configured", 3, r"its description\.groups\.0\.configured is 3, which is not an object"),
    ],
)
def test_what_is_wrong_in_a_description_is_named(
    stepped: MegatronOptimizer, place: str, value: Any, words: str
) -> None:
    """By its place, with what stands there and what should."""
    saved = stepped.checkpoint_state().state_dict()
    described = json.loads(saved["description"])
    *way, last = place.split("/")
    inside: Any = described
    for key in way:
        inside = inside[int(key) if isinstance(inside, list) else key]
    inside[last] = value
    before = str(stepped.state_dict())
    with pytest.raises(CheckpointError, match=words):
        stepped.checkpoint_state().load_state_dict({**saved, "description": json.dumps(described)})
    assert str(stepped.state_dict()) == before


@pytest.mark.parametrize("version", [99, 5, 3, 2, 1, 0, -1, True, "4", None])
def test_another_format_is_refused(stepped: MegatronOptimizer, version: Any) -> None:
    """It says who wrote it, and what to install."""
    saved = stepped.checkpoint_state().state_dict()
    described = {**json.loads(saved["description"]), "version": version}
    with pytest.raises(
        CheckpointVersionError, match=rf"format version {version!r}, written by megaopt-core .*--upgrade"
    ):
        stepped.checkpoint_state().load_state_dict({**saved, "description": json.dumps(described)})


@pytest.mark.parametrize("given", [5, None, [], {"state": {}}, {1: 2, "state": {}}])
def test_what_is_no_checkpoint_state_is_refused(stepped: MegatronOptimizer, given: Any) -> None:
    """Anything may be handed over."""
    with pytest.raises(StateDictError, match="a checkpoint state has the keys"):
        stepped.checkpoint_state().load_state_dict(given)


def test_state_that_maps_nothing_is_refused(stepped: MegatronOptimizer) -> None:
    """It is named, and nothing else is."""
    saved = stepped.checkpoint_state().state_dict()
    with pytest.raises(StateDictError, match="'state' of a checkpoint state maps names to tensors, got int"):
        stepped.checkpoint_state().load_state_dict({**saved, "state": 5})
