"""The roles of parameters by the type of their module: the modules of libraries, by qualified class name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import evolve
from torch import nn

from megaopt_core.params import Doubt, Fused, MatrixView, Role, RoleDecision
from megaopt_roles.structure import Structure, is_a, is_layer
from megaopt_roles.torch_modules import by_module_type

__all__ = ["by_type", "layer_view"]

type Shape = tuple[int, ...]

_EXPERTS = MatrixView(batch_dims=1)
_MEGATRON_LINEAR = "megatron.core.tensor_parallel.layers."


def by_type(structure: Structure, owner: tuple[str, nn.Module, str], shape: Shape) -> RoleDecision | None:
    """Return what the table says of a parameter; None where it is a layer whose role is open, or not known.

    Args:
        structure: of the model.
        owner: name of the module, the module, and its attribute.
        shape: of the parameter.
    """
    name, module, attribute = owner
    for names, attributes, dims, rule in _TABLE:
        fits = is_a(module, *names) and re.fullmatch(attributes, attribute) and dims in (0, len(shape))
        if fits and (found := rule(module, attribute, shape)) is not None:
            return found
    part = _of_adaptive_softmax(structure, name)
    if part is not None:
        return part
    found = by_module_type(module, attribute, shape)
    if found is None or (found.role is Role.MATRIX and is_layer(module)):
        return None
    return found


def _transformers(module: nn.Module, attribute: str, shape: Shape) -> RoleDecision | None:
    """Return what modules of transformers are: routers and expert stacks."""
    kind = type(module).__name__
    if re.search("Router|Gate", kind):
        return RoleDecision.matrix(f"router ({kind})") if attribute == "weight" and len(shape) == 2 else None
    if "Experts" not in kind:
        return None
    if attribute.endswith("bias"):
        return RoleDecision.elementwise(f"biases of {kind}, a row for each expert")
    if len(shape) != 3:
        return None
    transposed = getattr(module, "is_transposed", None)
    if not isinstance(transposed, bool):
        return RoleDecision.matrix(f"stack of {kind}", _EXPERTS).doubted(
            "how it is stored is not known", Doubt.LAYOUT
        )
    view = evolve(_EXPERTS, transposed=transposed)
    if "gate_up" in attribute and getattr(module, "has_gate", True):
        rows = shape[1 if not transposed else 2] // 2
        concatenated = getattr(module, "is_concatenated", True)
        view = evolve(
            view, split_sizes=(rows, rows) if concatenated else (1, 1), label="gate_up", fused=Fused.GATE_UP
        )
    return RoleDecision.matrix(f"stack of {kind}", view)


def _engine_matrix(module: nn.Module, attribute: str, shape: Shape) -> RoleDecision:
    gated = attribute == "fc1_weight" and str(getattr(module, "activation", "")).endswith("glu")
    split = (shape[0] // 2,) * 2 if gated else ()
    return RoleDecision.matrix(f"{attribute} of {type(module).__name__}", MatrixView(split_sizes=split))


type Rule = Callable[[nn.Module, str, Shape], RoleDecision | None]

_ENGINE = ("transformer_engine.pytorch.", "megatron.core.extensions.transformer_engine.")
_TABLE: list[tuple[tuple[str, ...], str, int, Rule]] = [
    ((_MEGATRON_LINEAR + "VocabParallelEmbedding",), "weight", 2,
     lambda module, *_: RoleDecision.embedding(f"table of {type(module).__name__}")),
    (("megatron.core.transformer.moe.router.Router",), "weight", 2,
     lambda module, *_: RoleDecision.matrix(f"router ({type(module).__name__})")),
    (("megatron.core.ssm.mamba_mixer.MambaMixer",), "conv1d_weight", 0,
     lambda *_: RoleDecision.elementwise("depthwise convolution of MambaMixer")),
    (("torchtitan.models.common.moe.GroupedExperts",), ".*", 3,
     lambda module, *_: RoleDecision.matrix(f"stack of {type(module).__name__}, one matrix for each expert", _EXPERTS)),
    (_ENGINE, "layer_norm_.*", 0, lambda module, *_: RoleDecision.elementwise(f"norm of {type(module).__name__}")),
    (_ENGINE, r"fc[12]_weight|weight\d+", 2, _engine_matrix),
    (("transformers.",), ".*", 0, _transformers),
]  # fmt: skip
"""Classes, a pattern of attributes, their dimensions (0: any number), and what these parameters are."""


def _of_adaptive_softmax(structure: Structure, name: str) -> RoleDecision | None:
    above = (name, *structure.above(name))
    if any(isinstance(structure.modules[part], nn.AdaptiveLogSoftmaxWithLoss) for part in above):
        return RoleDecision.output("part of AdaptiveLogSoftmaxWithLoss")
    return None


# ------------------------------------------------------------------------------------------- the views of fused layers


def layer_view(structure: Structure, name: str, module: nn.Module, shape: Shape) -> tuple[MatrixView, bool]:
    """Return the view of a layer, and whether the type of the module that holds it says so: its parts are known then.

    Args:
        structure: of the model.
        name: of the layer.
        module: the layer.
        shape: of its weight.
    """
    found = by_module_type(module, "weight", shape)
    base = MatrixView() if found is None or found.view is None else found.view
    parent_name, _, child = name.rpartition(".")
    parent = structure.modules.get(parent_name)
    if parent is None or not name:
        return base, False
    if isinstance(parent, nn.MultiheadAttention) and child == "out_proj":
        return MatrixView(head_columns=parent.head_dim), False
    for names, rule in _FUSED:
        if is_a(parent, *names) and (fused := rule(parent, child, shape)) is not None:
            return fused, True
    latent = _latent_attention(parent, child, shape)
    return latent or base, latent is not None


def _titan_qkv(parent: Any, child: str, shape: Shape) -> MatrixView | None:
    if child != "wqkv":
        return None
    size = parent.head_dim
    return _qkv(parent.heads_per_kv * size, size, gated=False)


def _qkv(query: int, head: int, *, gated: bool) -> MatrixView:
    sizes = (query, query, head, head) if gated else (query, head, head)
    return MatrixView(split_sizes=sizes, label="qkv", fused=Fused.QKV, head_sizes=(head,) * len(sizes))


def _megatron_attention(parent: Any, child: str, shape: Shape) -> MatrixView | None:
    config = parent.config
    groups = config.num_query_groups or config.num_attention_heads
    head = config.kv_channels
    if child == "linear_qkv":
        query = config.num_attention_heads // groups * head
        return _qkv(query, head, gated=bool(getattr(config, "attention_output_gate", False)))
    if child == "linear_kv":
        return MatrixView(split_sizes=(head, head), label="kv", head_sizes=(head, head))
    return None


def _megatron_mlp(parent: Any, child: str, shape: Shape) -> MatrixView | None:
    if child != "linear_fc1" or not parent.config.gated_linear_unit:
        return None
    return MatrixView(split_sizes=(shape[0] // 2,) * 2, label="gate_up", fused=Fused.GATE_UP)


def _megatron_mamba(parent: Any, child: str, shape: Shape) -> MatrixView | None:
    sizes = getattr(parent.in_proj.weight, "partition_sizes", None)
    return MatrixView(split_sizes=tuple(sizes), label="z x B C dt") if child == "in_proj" and sizes else None


def _latent_attention(parent: Any, child: str, shape: Shape) -> MatrixView | None:
    """Return the views of multi-head latent attention: a head of `kv_b` holds a key without position and a value."""
    source = getattr(parent, "config", parent) if is_a(parent, "megatron.core.") else parent
    rank, value = (getattr(source, key, 0) for key in ("kv_lora_rank", "v_head_dim"))
    nope = getattr(source, "qk_nope_head_dim", getattr(source, "qk_head_dim", 0))
    rope = getattr(source, "qk_rope_head_dim", getattr(source, "qk_pos_emb_head_dim", 0))
    sizes = (rank, value, nope, rope)
    if not all(isinstance(size, int) for size in sizes) or min(sizes[:3]) <= 0:
        return None
    if child in ("wkv_b", "kv_b_proj", "linear_kv_up_proj") and shape[0] % (nope + value) == 0:
        return MatrixView(split_sizes=(nope, value), label="kv up", head_sizes=(nope, value))
    if child in ("wkv_a", "kv_a_proj_with_mqa", "linear_kv_down_proj") and rope and shape[0] == rank + rope:
        return MatrixView(split_sizes=(rank, rope), label="kv down")
    if child in ("wq", "wq_b", "q_proj", "q_b_proj", "linear_q_proj", "linear_q_up_proj"):
        whole = shape[0] % (nope + rope) == 0
        return MatrixView(head_sizes=(nope + rope,)) if whole else None
    return None


_FUSED: list[tuple[tuple[str, ...], Callable[[Any, str, Shape], MatrixView | None]]] = [
    (("torchtitan.models.common.attention.FusedQKVLinear",), _titan_qkv),
    (
        (
            "megatron.core.transformer.attention.SelfAttention",
            "megatron.core.transformer.attention.CrossAttention",
        ),
        _megatron_attention,
    ),
    (
        ("megatron.core.transformer.mlp.MLP", "megatron.core.transformer.moe.experts.TEGroupedMLP"),
        _megatron_mlp,
    ),
    (("megatron.core.ssm.mamba_mixer.MambaMixer",), _megatron_mamba),
]
