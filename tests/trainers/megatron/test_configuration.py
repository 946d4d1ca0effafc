"""Megatron's configuration, keys and names as ours."""

import dataclasses
from collections import Counter
from typing import Any

import megatron_harness as harness
import pytest

from megaopt_core import OptimizerConfig

pytestmark = pytest.mark.distributed


def _defaults(rank: int, size: int) -> tuple:
    from megatron.core.optimizer import OptimizerConfig as Theirs

    ours = {field.name: getattr(OptimizerConfig(), field.name) for field in dataclasses.fields(Theirs)}
    return ours, {field.name: field.default for field in dataclasses.fields(Theirs)}


def test_defaults_of_all_settings_are_the_same(launch) -> None:
    """A setting that nobody gives means the same in both configurations."""
    ((ours, theirs),) = launch(_defaults, 1)
    assert ours == theirs


def _built(rank: int, size: int, settings: dict[str, Any], **more: Any) -> tuple:
    harness.start()
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as Theirs

    model = harness.gpt(harness.transformer_config())
    optimizer = get_megatron_optimizer(Theirs(**settings), [model], **more)
    groups = {optimizer.names[param]: group for group in optimizer.param_groups for param in group["params"]}
    return optimizer.config, {name: group["weight_decay"] for name, group in groups.items()}


def test_settings_that_differ_from_their_defaults_are_taken(launch) -> None:
    """Of the core and of plugins, and no others."""
    ((config, _),) = launch(
        _built, 1, {"lr": 1e-3, "adam_beta2": 0.9, "clip_grad": 0.0, "muon_momentum": 0.95}
    )
    assert config == OptimizerConfig(lr=1e-3, adam_beta2=0.9, clip_grad=0.0)


def _is_last(param: Any, name: str) -> bool:
    return name.endswith("final_layernorm.bias")


def _override(rank: int, size: int) -> dict[str, float]:
    harness.start()
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as Theirs
    from megatron.core.optimizer import ParamKey, ParamWithNamePredicate

    model = harness.wrapped(harness.transformer_config())
    keys = {
        ParamKey(name="module.decoder.layers.1.*"): {"wd_mult": 0.5},
        ParamKey(with_name_predicate=ParamWithNamePredicate("last", _is_last)): {"wd_mult": 0.25},
        ParamKey(attr="is_embedding_or_output_parameter"): {"wd_mult": 2.0},
    }
    optimizer = get_megatron_optimizer(Theirs(lr=1e-3, weight_decay=0.1), [model], keys)
    return {
        optimizer.names[param]: round(group["weight_decay"], 4)
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_keys_match_as_megatrons_do(launch) -> None:
    """By names with what wrappers add, by predicates and by attributes."""
    (found,) = launch(_override, 1)
    assert {decay for name, decay in found.items() if ".layers.1." in name} == {0.05}
    assert {decay for name, decay in found.items() if ".layers.0." in name} == {0.1}
    assert found["decoder.final_layernorm.bias"] == 0.025
    assert found["embedding.word_embeddings.weight"] == 0.2


def _named(rank: int, size: int, parallel: dict, settings: dict) -> list[str]:
    harness.start(**parallel)
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as Theirs

    model = harness.wrapped(harness.transformer_config(num_layers=4, **settings))
    optimizer = get_megatron_optimizer(Theirs(lr=1e-3), [model])
    return sorted(optimizer.names.values())


def test_stages_and_experts_have_names_of_their_own(launch) -> None:
    """Layers are counted over stages, and experts over ranks."""
    first, second = launch(_named, 2, {"pp": 2}, {})
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in second if ".layers." in name} == {"2", "3"}
    first, second = launch(_named, 2, {"ep": 2}, harness.MOE)
    for rank, names in enumerate((first, second)):
        numbers = {name.split("local_experts.")[1][0] for name in names if "local_experts" in name}
        assert numbers == {str(2 * rank), str(2 * rank + 1)}
    assert set(first) & set(second) == {name for name in first if "local_experts" not in name}


def _of_muon(rank: int, size: int, kind: str, settings: dict) -> list[str]:
    harness.start()
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as Theirs

    config = harness.transformer_config(num_layers=4 if kind == "hybrid" else 2, **settings)
    model = harness.wrapped(config, model=getattr(harness, kind)(config))
    optimizer = get_megatron_optimizer(Theirs(optimizer="muon", lr=1e-3), [model])
    return [row.name for row in optimizer.report().params if row.optimizer == "muon"]


DENSE = {"linear_qkv": 2, "linear_proj": 2, "linear_fc1": 2, "linear_fc2": 2}
ROUTED = DENSE | {"router": 2, "linear_fc1": 8, "linear_fc2": 8}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("gpt", {}, DENSE),
        ("hybrid", {}, DENSE),
        ("gpt", harness.MOE, ROUTED),
        ("hybrid", harness.MOE, ROUTED),
    ],
)
def test_muon_steps_the_matrices_of_each_layer(launch, kind, settings, expected) -> None:
    """Nobody marks them: fused and output projections, both layers of an MLP and of each expert, and routers."""
    (names,) = launch(_of_muon, 1, kind, settings)
    assert Counter(name.split(".")[-2] for name in names) == expected
