"""Optimizers of other packages that are wrapped by hand, without an entry."""

import pytest
import torch
from megaopt_testing.process_state import seed_all
from torch import nn

from megaopt_core import FP32Optimizer, OptimizerConfig

pytestmark = pytest.mark.any_python

NAMES = {
    "pytorch_optimizer": (
        "Adan",
        "Aida",
        "GrokFastAdamW",
        "Gravity",
        "Kron",
        "NovoGrad",
        "Prodigy",
        "QHAdam",
        "ScheduleFreeAdamW",
        "SOAP",
        "SRMM",
    ),
    "schedulefree": ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"),
}


def _matrices() -> nn.Sequential:
    """Return a model of matrices, of which one gets no gradient in the first step."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(3)])


def _run(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if hasattr(optimizer, "train"):
        optimizer.train()
    seed_all(7)  # one of them tosses a coin of numpy's in every step
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for index, layer in enumerate(model):
            unused = index == 2 and step == 0
            layer.weight.grad = None if unused else torch.randn(5, 5, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in NAMES.items() for name in names]
)
def test_optimizers_of_others_step_as_they_do_alone(package: str, name: str) -> None:
    """Those that cannot step on zeros, or not before `train()`, or that count outside their state too."""
    cls = getattr(pytest.importorskip(package), name)
    ours, theirs = _matrices(), _matrices()
    torch.manual_seed(5)
    expected = _run(theirs, cls(theirs.parameters()))
    torch.manual_seed(5)
    wrapped = FP32Optimizer(cls(ours.named_parameters()), OptimizerConfig(clip_grad=0.0))
    assert all(torch.equal(*pair) for pair in zip(_run(ours, wrapped), expected, strict=True))
