"""Models as their authors write them, from nanoGPT to graph attention: one forward shows what each parameter is."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megaopt_core.params import Role
from megaopt_core.routing import infer_roles


def _load(name: str) -> ModuleType:
    path = Path(__file__).parent / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = [f"zoo/zoo_{name}.py" for name in ("language", "layers", "other", "sequence", "vision", "small")]
EXPECTED: dict[str, Any] = {}
for _file in FILES:
    EXPECTED |= _load(_file).EXPECTED


def ids(*shape: int) -> torch.Tensor:
    """Return whole numbers."""
    return torch.zeros(shape, dtype=torch.long)


def x(*shape: int) -> torch.Tensor:
    """Return activations."""
    return torch.zeros(shape)


EXAMPLES = {
    "nanoGPT": (ids(2, 6),),
    "speedrun": (ids(6), ids(6)),
    "latent and grouped attention": (ids(2, 5), x(1), x(1)),
    "recurrences": (ids(2, 5),),
    "one layer for all depths": (ids(2, 6), ids(2, 6)),
    "splines": (x(4, 6),),
    "hypernetwork": (x(4, 5),),
    "hand-written adapters": (ids(2, 5),),
    "expert layouts": (ids(2, 8), torch.tensor([4, 4, 4, 4])),
    "factorization machine": (x(4, 3), ids(4, 2)),
    "dot interaction": (x(2, 3), ids(2, 2), ids(2, 4)),
    "cross network": (x(4, 8),),
    "two towers": (ids(4), ids(4)),
    "dueling": (x(2, 4, 28, 28),),
    "graph attention": (ids(5), ids(2, 7), x(5, 5)),
    "quantile forecaster": (ids(3), x(3, 6, 1)),
    "doubly residual": (x(3, 10),),
    "knowledge graph": (ids(4), ids(4), ids(4)),
    "tagger with a CRF": (ids(6, 2), ids(6, 2)),
    "additive attention": (ids(2, 5), ids(2, 4)),
    "pointer network": (x(2, 5, 2),),
    "tree": (ids(8), [ids(4, 2), ids(2, 2), ids(1, 2)]),
    "memory": (x(5, 2, 6),),
    "text by convolutions": (ids(2, 12),),
    "skip-gram": (ids(3), ids(3), ids(3, 5)),
    "windows and bias tables": (x(2, 3, 16, 16),),
    "inverted residuals": (x(2, 3, 16, 16),),
    "diffusion U-Net": (x(2, 3, 8, 8), ids(2), ids(2)),
    "quantized autoencoder": (x(2, 3, 8, 8),),
    "radiance field": (x(5, 24),),
    "recurrent convolution": (x(2, 3, 3, 8, 8),),
    "capsules": (x(2, 1, 3, 5),),
    "contrastive": (x(2, 3, 8, 8), x(2, 3, 8, 8)),
    "masked autoencoder": (x(2, 9, 12),),
    "gpt, untied": (ids(2, 6),),
    "gpt, tied": (ids(2, 6),),
    "tied head registered first": (ids(2, 6),),
    "hidden layers share a weight": (ids(2, 6),),
    "experts by einsum": (x(2, 5, 8),),
    "experts by bmm": (x(4, 5, 8),),
    "experts one by one": (x(5, 8),),
    "recommender": (x(3, 5), ids(3, 2, 4)),
    "bare tables": (ids(3), ids(3)),
    "vision": (x(2, 3, 32, 32),),
    "variational autoencoder": (x(2, 784),),
    "sequence to sequence": (ids(2, 5), ids(2, 4)),
    "mixer without a head": (x(2, 9, 16),),
    "diffusion transformer": (x(2, 5, 8), x(2, 16)),
    "graph convolutions": (x(5, 20), x(5, 5)),
    "unusual layers": (x(2, 8),),
    "state space": (ids(2, 5),),
    "u-net": (x(2, 3, 8, 8),),
    "siamese": (x(2, 1, 28, 28), x(2, 1, 28, 28)),
    "layers by name, heads in a dictionary": (ids(2, 5),),
    "everything functional": (ids(2, 5),),
}
"""A batch for each; two others have no forward that runs."""

DOUBTFUL = {"capsules": ["W"]}
"""What stays in doubt although a forward was seen: lengths of capsules are the classes, and a decoder takes them."""

NUMBERS = {"expert layouts", "experts one by one"}
"""Forwards that choose rows by numbers: they run on a model that has some."""

LIMITS = {"doubly residual"}
"""The layers of forecasts stand in repeated blocks, which conventions take for hidden."""


@pytest.mark.parametrize(
    ("case", "device"),
    [
        (case, device)
        for case in EXAMPLES
        for device in ("cpu", "meta")
        if device == "cpu" or case not in NUMBERS
    ],
)
def test_every_parameter_is_seen_for_what_it_is(case, device):
    """Every parameter of more than one dimension has the role and the view that its use gives it, and surely."""
    factory, expected = EXPECTED[case]
    with torch.device(device):
        model = factory()
    decisions = infer_roles(model, example=EXAMPLES[case])
    shapes = {name: param.shape for name, param in model.named_parameters()}
    found = {
        name: decision.view if decision.role is Role.MATRIX else decision.role
        for name, decision in decisions.items()
        if len(shapes[name]) > 1
    }
    doubtful = DOUBTFUL.get(case, [])
    assert {name: said for name, said in found.items() if name not in doubtful} == {
        name: said for name, said in expected.items() if name not in doubtful
    }
    assert [name for name, decision in decisions.items() if decision.uncertain] == doubtful
    for name, param in model.named_parameters():
        view = decisions[name].view
        if view is not None:
            assert sum(matrix.numel() for matrix in view.matrices(param.detach())) == param.numel()


@pytest.mark.parametrize("case", sorted(EXPECTED.keys() - LIMITS))
def test_without_a_batch_nothing_is_wrong_and_certain(case):
    """By types and conventions alone: what is certain is right, but for a view."""
    factory, expected = EXPECTED[case]
    with torch.device("meta"):
        decisions = infer_roles(factory())
    wrong = {
        name: (said, decisions[name].reason)
        for name, said in expected.items()
        if not decisions[name].uncertain
        and decisions[name].role is not (said if isinstance(said, Role) else Role.MATRIX)
    }
    assert wrong == {}
