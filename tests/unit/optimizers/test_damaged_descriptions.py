"""What torch's checkpoints hold of an optimizer is a document of a stranger, too."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.errors import CheckpointCorruptError, CheckpointVersionError, MegaoptError, StateDictError
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


@pytest.mark.parametrize("text", ["", "nope", "null", "[]", "5", "{}", '{"version": 4, "parameters": {}}'])
def test_what_is_no_description_is_damaged(stepped: MegatronOptimizer, text: str) -> None:
    """Also one that lacks what it must have."""
    saved = stepped.checkpoint_state().state_dict()
    with pytest.raises((CheckpointCorruptError, StateDictError), match=r"^the checkpoint"):
        stepped.checkpoint_state().load_state_dict({**saved, "description": text})


def test_a_newer_format_is_refused(stepped: MegatronOptimizer) -> None:
    """It says who wrote it, and what to install."""
    saved = stepped.checkpoint_state().state_dict()
    described = {**json.loads(saved["description"]), "version": 99}
    with pytest.raises(
        CheckpointVersionError, match=r"format version 99, written by megaopt-core .*--upgrade"
    ):
        stepped.checkpoint_state().load_state_dict({**saved, "description": json.dumps(described)})


@pytest.mark.parametrize("given", [5, None, [], {"state": {}}])
def test_what_is_no_checkpoint_state_is_refused(stepped: MegatronOptimizer, given: Any) -> None:
    """Anything may be handed over."""
    with pytest.raises(StateDictError, match="a checkpoint state has the keys"):
        stepped.checkpoint_state().load_state_dict(given)
