"""Layers of libraries, known by their qualified class names: stand-ins of the same names, without the libraries."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core.params import Fused, MatrixView, Role
from megaopt_core.routing import infer_roles

STACK = MatrixView(batch_dims=1)
PLAIN = MatrixView()


def named(qualified: str, base: type[nn.Module] = nn.Module, **attributes: Any) -> nn.Module:
    """Return a module whose class has a qualified name; parameters are given as shapes."""
    package, _, name = qualified.rpartition(".")
    module = type(name, (base,), {"__module__": package})()
    for attribute, value in attributes.items():
        is_shape = isinstance(value, tuple)
        setattr(module, attribute, nn.Parameter(torch.zeros(value)) if is_shape else value)
    return module


class Model(nn.Module):
    """One layer between an embedding and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layer, self.after = nn.Embedding(40, 8), layer, nn.Linear(8, 12)
        self.head = nn.Linear(12, 40)


def seen(layer: nn.Module, name: str) -> Role | MatrixView | None:
    """Return what a parameter of the layer is seen as; nothing of it is in doubt."""
    decision = infer_roles(Model(layer))[f"layer.{name}"]
    assert not decision.uncertain, decision
    return decision.view if decision.role is Role.MATRIX else decision.role


MEGATRON = "megatron.core.tensor_parallel.layers."
ENGINE = "transformer_engine.pytorch.module."


@pytest.mark.parametrize(
    ("qualified", "attributes", "expected"),
    [
        (f"{MEGATRON}VocabParallelEmbedding", {"weight": (40, 8)}, {"weight": Role.EMBEDDING}),
        (f"{MEGATRON}ColumnParallelLinear", {"weight": (8, 8)}, {"weight": PLAIN}),
        (f"{MEGATRON}RowParallelLinear", {"weight": (8, 8)}, {"weight": PLAIN}),
        ("megatron.core.transformer.moe.router.Router", {"weight": (4, 8)}, {"weight": PLAIN}),
        (
            "megatron.core.ssm.mamba_mixer.MambaMixer",
            {"conv1d_weight": (8, 1, 4)},
            {"conv1d_weight": Role.ELEMENTWISE},
        ),
        (f"{ENGINE}linear.Linear", {"weight": (8, 8)}, {"weight": PLAIN}),
        (
            f"{ENGINE}layernorm_mlp.LayerNormMLP",
            {
                "fc1_weight": (32, 8),
                "fc2_weight": (8, 16),
                "layer_norm_weight": (8, 1),
                "activation": "swiglu",
            },
            {
                "fc1_weight": MatrixView(split_sizes=(16, 16)),
                "fc2_weight": PLAIN,
                "layer_norm_weight": Role.ELEMENTWISE,
            },
        ),
        (f"{ENGINE}grouped_linear.GroupedLinear", {"weight0": (8, 8), "weight1": (8, 8)}, {"weight1": PLAIN}),
        (
            "torchtitan.models.common.moe.GroupedExperts",
            {"w1_EFD": (4, 16, 8), "w2_EDF": (4, 8, 16)},
            {"w1_EFD": STACK, "w2_EDF": STACK},
        ),
        (
            "transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter",
            {"weight": (4, 8)},
            {"weight": PLAIN},
        ),
        (
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
            {
                "gate_up_proj": (4, 32, 8),
                "down_proj": (4, 8, 16),
                "is_transposed": False,
                "is_concatenated": True,
            },
            {"gate_up_proj": MatrixView(batch_dims=1, split_sizes=(16, 16)), "down_proj": STACK},
        ),
        (
            "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts",
            {
                "gate_up_proj": (4, 8, 32),
                "down_proj_bias": (4, 8),
                "is_transposed": True,
                "is_concatenated": False,
            },
            {
                "gate_up_proj": MatrixView(batch_dims=1, transposed=True, split_sizes=(1, 1)),
                "down_proj_bias": Role.ELEMENTWISE,
            },
        ),
        (
            "transformers.pytorch_utils.Conv1D",
            {"weight": (8, 8), "nf": 8, "nx": 8},
            {"weight": MatrixView(transposed=True)},
        ),
    ],
)
def test_what_a_layer_of_a_library_is(qualified, attributes, expected):
    """Its parameters have the role and view that its class says."""
    for name, what in expected.items():
        assert seen(named(qualified, **attributes), name) == what


def test_a_class_of_the_same_name_from_elsewhere_is_not_taken_for_it():
    """The whole name counts."""
    own = named("my.router.GroupedExperts", w=(4, 16, 8))
    assert infer_roles(Model(own))["layer.w"].uncertain


CONFIG = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=4, gated_linear_unit=True)
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}


@pytest.mark.parametrize(
    ("qualified", "attributes", "child", "rows", "sizes"),
    [
        (
            "torchtitan.models.common.attention.FusedQKVLinear",
            {"heads_per_kv": 2, "head_dim": 4},
            "wqkv",
            32,
            (8, 4, 4),
        ),
        (
            "megatron.core.transformer.attention.SelfAttention",
            {"config": CONFIG},
            "linear_qkv",
            32,
            (8, 4, 4),
        ),
        ("megatron.core.transformer.attention.CrossAttention", {"config": CONFIG}, "linear_kv", 16, (4, 4)),
        ("megatron.core.transformer.mlp.MLP", {"config": CONFIG}, "linear_fc1", 24, (12, 12)),
        ("torchtitan.models.deepseek_v3.model.Attention", LATENT, "wkv_b", 40, (4, 6)),
        (
            "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention",
            LATENT,
            "kv_b_proj",
            40,
            (4, 6),
        ),
        ("my.attention.Attention", LATENT, "kv_a_proj_with_mqa", 14, (12, 2)),
        ("my.attention.Attention", LATENT, "q_b_proj", 24, ()),
    ],
)
def test_the_parts_of_a_layer_that_a_known_module_fuses(qualified, attributes, child, rows, sizes):
    """They are split, also under tensor parallelism, where a rank holds half of the groups."""
    for part in (1, 2) if child not in ("kv_a_proj_with_mqa", "linear_fc1") else (1,):
        parent = named(qualified, **attributes)
        parent.add_module(child, nn.Linear(8, rows // part, bias=False))
        view = seen(parent, f"{child}.weight")
        assert isinstance(view, MatrixView)
        assert view == MatrixView(split_sizes=sizes)
        assert (view.fused is Fused.QKV) == (len(sizes) == 3)


def test_mamba_of_megatron_is_split_as_its_attribute_says():
    """`partition_sizes` of `in_proj` are the rows of z, x, B, C and dt."""
    mixer = named("megatron.core.ssm.mamba_mixer.MambaMixer")
    mixer.in_proj = nn.Linear(8, 46, bias=False)
    mixer.in_proj.weight.partition_sizes = [16, 16, 6, 6, 2]
    assert seen(mixer, "in_proj.weight") == MatrixView(split_sizes=(16, 16, 6, 6, 2))


@pytest.mark.parametrize("mark", ["is_embedding_or_output_parameter", "is_embedding_parameter"])
def test_a_model_that_marks_its_ends_has_told_which_matrices_are_hidden(mark):
    """All other layers are, whatever they are called and wherever they stand."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    setattr(model[0].weight, mark, True)
    decisions = infer_roles(model)
    assert {name: str(decisions[name].role) for name in ("0.weight", "1.weight", "2.weight")} == {
        "0.weight": "embedding",
        "1.weight": "matrix",
        "2.weight": "matrix",
    }
    assert not any(decision.uncertain for decision in decisions.values())


def test_use_muon_keeps_the_view_of_the_module():
    """The attribute says the role; the parts of a fused weight come from the module that fuses it."""
    parent = named("torchtitan.models.common.attention.FusedQKVLinear", heads_per_kv=2, head_dim=4)
    parent.wqkv = nn.Linear(8, 32, bias=False)
    parent.wqkv.weight.use_muon = True
    assert seen(parent, "wqkv.weight") == MatrixView(split_sizes=(8, 4, 4))
    stack = named("torchtitan.models.common.moe.GroupedExperts", w1_EFD=(4, 16, 8))
    stack.w1_EFD.use_muon = True
    assert seen(stack, "w1_EFD") == STACK


@pytest.mark.parametrize("shape", [(16, 8), (4, 16, 8)])
def test_use_muon_of_a_bare_parameter_leaves_its_view_in_doubt(shape):
    """Nothing shows which matrices lie inside; a forward does."""
    model = Model(named("my.Layer", w=shape))
    model.layer.w.use_muon = True
    decision = infer_roles(model)["layer.w"]
    assert (decision.role, str(decision.doubt)) == (Role.MATRIX, "layout")
