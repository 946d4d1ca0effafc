"""Checkpoints keep the state of parameters that are frozen where they are loaded."""

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from torch import nn
from training import make, same, train, values

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.filterwarnings("ignore:.*trains since the optimizer was built:UserWarning"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(
    optimizer: str, dtype: torch.dtype, *, frozen: bool, seed: int = 0
) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model whose embedding may be frozen, and its optimizer."""
    settings = {"bf16": True} if dtype is torch.bfloat16 else {}
    model, _ = make(seed=seed, dtype=dtype)
    model.get_submodule("embedding").requires_grad_(not frozen)
    return model, build_optimizer(model, optimizer, lr=1e-2, weight_decay=0.1, clip_grad=0.0, **settings)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("here", ["frozen", "trains", "twice"])
def test_a_run_that_unfroze_goes_on_as_it_was(tmp_path, optimizer, dtype, here):
    """To the bit, frozen or not at the load, also saved again while it is frozen."""
    model, stepped = run(optimizer, dtype, frozen=True)
    train(model, stepped, range(2))
    model.get_submodule("embedding").requires_grad_(True)
    train(model, stepped, range(2, 4))
    save_checkpoint(tmp_path / "last", model, stepped)
    train(model, stepped, range(4, 6))
    expected = values(model)
    model, stepped = run(optimizer, dtype, frozen=here != "trains", seed=1)
    load_checkpoint(tmp_path / "last", model, stepped)
    if here == "twice":
        save_checkpoint(tmp_path / "again", model, stepped)
        before = verify_checkpoint(tmp_path / "last").parameters
        after = verify_checkpoint(tmp_path / "again").parameters
        assert before["embedding.weight"]["state"] == after["embedding.weight"]["state"]
        model, stepped = run(optimizer, dtype, frozen=True, seed=2)
        load_checkpoint(tmp_path / "again", model, stepped, rename=lambda name: name)
    model.get_submodule("embedding").requires_grad_(True)
    train(model, stepped, range(4, 6))
    assert same(values(model), expected)


def test_what_is_no_parameter_here_is_still_an_error(tmp_path):
    """Only parameters of this model are kept aside."""
    model, stepped = run("adam", torch.float32, frozen=False)
    train(model, stepped, [0])
    save_checkpoint(tmp_path / "last", model, stepped)
    small = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    small[0].requires_grad_(False)
    with pytest.raises(CheckpointMismatchError, match="which is not here"):
        load_checkpoint(tmp_path / "last", None, build_optimizer(small, "adam", lr=0.1))
