"""LoRA's factors and timm's layers get the learning rates that their recipes say."""

import runpy
import sys
from pathlib import Path

import peft
import pytest
import timm
import torch
from megaopt_trainers.peft import lora_overrides
from megaopt_trainers.timm import layer_decay_overrides
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft to transformers

SCRIPT = Path(__file__).parents[3] / "examples" / "lora" / "train.py"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def adapted(**settings: object) -> nn.Module:
    """Return a small Llama with adapters of a projection, the table and, where asked, DoRA's vectors."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES))
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], **settings)
    )


def lr_and_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, str]]:
    """Return both for each kind of factor."""
    return {
        next(part for part in row.name.split(".") if part.startswith("lora_")): (row.lr, row.optimizer)
        for row in optimizer.report().params
    }


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_factors_have_the_learning_rates_of_the_recipe(kind) -> None:
    """B has its ratio, adapters of embeddings their own rate and Adam; the rest has the base rate."""
    model = adapted(use_dora=False)
    overrides = lora_overrides(model, lr=0.125, ratio=16, embedding_lr=0.25)
    optimizer = build_optimizer(model, kind, lr=0.125, overrides=overrides)
    assert lr_and_optimizer(optimizer) == {
        "lora_A": (0.125, kind),
        "lora_B": (2.0, kind),
        "lora_embedding_A": (0.25, "adam"),
        "lora_embedding_B": (0.25, "adam"),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, r"lora_overrides\(lr=0.0\): a positive, finite number"),
        ({"lr": 0.1, "ratio": "big"}, r"lora_overrides\(ratio='big'\)"),
        ({"lr": 0.1}, r"no parameter of the model that trains is a factor"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(settings, said) -> None:
    """By name; a model without adapters too."""
    with pytest.raises(ConfigurationError, match=said):
        lora_overrides(nn.Linear(4, 4), **settings)


def test_a_rate_for_embeddings_without_adapters_is_refused() -> None:
    """It would set nothing."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ConfigurationError, match="no embedding of the model has an adapter that trains"):
        lora_overrides(model, lr=0.1, embedding_lr=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_the_example_of_adapters_trains(kind, tmp_path, monkeypatch, capsys) -> None:
    """Its loss falls from log(128), which is 4.85."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--optimizer", kind])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    (last,) = [line for line in printed.splitlines() if line.startswith("step 20: mean loss")]
    assert float(last.split()[-1]) < 4.8
    assert kind in printed


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_layers_of_timm_have_its_learning_rates(kind) -> None:
    """Those of its own groups, for each parameter; its scheduler drives them."""
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    overrides = layer_decay_overrides(model, lr=0.5, layer_decay=0.5)
    optimizer = build_optimizer(model, kind, lr=0.5, weight_decay=0.05, overrides=overrides)
    expected = {
        param: (0.5 * group["lr_scale"], group["weight_decay"] > 0)
        for group in param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
        for param in group["params"]
    }
    actual = {
        param: (group["lr"], group["weight_decay"] > 0)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    name_of = {param: name for name, param in model.named_parameters()}
    assert {name_of[param]: lr for param, (lr, _) in actual.items()} == {
        name_of[param]: lr for param, (lr, _) in expected.items()
    }
    without = model.no_weight_decay()
    assert all(not decays for param, (_, decays) in actual.items() if name_of[param] in without)
    schedule = CosineLRScheduler(optimizer, t_initial=10, lr_min=0.0)
    schedule.step(5)
    assert max(group["lr"] for group in optimizer.param_groups) == pytest.approx(0.25)


@pytest.mark.parametrize("factor", [0, 1.5, "half"])
def test_a_decay_that_cannot_be_is_refused(factor) -> None:
    """Before timm is asked."""
    with pytest.raises(ConfigurationError, match=r"a factor in \(0, 1\]"):
        layer_decay_overrides(nn.Linear(4, 4), lr=0.1, layer_decay=factor)
