"""Adapters that PEFT deletes: the report names them, and an optimizer that is built anew goes on without them."""

import gc
import weakref
from collections.abc import Iterable

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megaopt_core import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def two_adapters() -> nn.Module:
    """Return a small Llama with two adapters that both train."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "other"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take steps on data that the step decides."""
    for step in steps:
        tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return what trains."""
    return [param.detach().clone() for param in model.parameters() if param.requires_grad]


def begun(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, list[weakref.ref[nn.Parameter]]]:
    """Return a run whose second adapter has just been deleted, and references to its factors."""
    model = two_adapters()
    optimizer = build_optimizer(model, kind, lr=1e-2)
    optimizer.param_groups[0]["lr"] = 3e-3
    train(model, optimizer, range(3))
    factors = [weakref.ref(param) for name, param in model.named_parameters() if ".other." in name]
    model.delete_adapter("other")
    return model, optimizer, factors


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_the_optimizer_goes_on_and_the_report_names_what_is_gone(kind) -> None:
    """As an optimizer of torch's does, which keeps what it was given."""
    model, optimizer, factors = begun(kind)
    before = trained(model)
    train(model, optimizer, range(3, 4))
    assert not any(map(torch.equal, trained(model), before))
    assert len(factors) == 2
    gone = ".other.weight' is stepped, but no longer in the model"
    assert [problem.endswith(gone) for problem in optimizer.report().problems] == [True, True]


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_one_that_is_built_anew_goes_on_to_the_bit_and_holds_nothing_of_them(kind) -> None:
    """With the states and the learning rates of what is left."""
    model, optimizer, _ = begun(kind)
    train(model, optimizer, range(3, 6))
    expected = trained(model)

    model, optimizer, factors = begun(kind)
    rest = build_optimizer(model, kind, lr=1e-2)
    rest.load_state_dict(optimizer.state_dict(), strict=False)
    del optimizer
    gc.collect()
    assert [factor() for factor in factors] == [None, None]
    train(model, rest, range(3, 6))
    assert all(map(torch.equal, trained(model), expected))
    assert rest.report().problems == ()
