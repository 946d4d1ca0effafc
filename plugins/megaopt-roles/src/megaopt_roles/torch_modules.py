"""The roles of parameters by the type of their module: torch's own modules, and what is stored as they are."""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from megaopt_core.params import Doubt, Fused, MatrixView, RoleDecision

__all__ = ["by_module_type", "by_shape", "is_conv1d", "is_linear"]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_GATES: dict[type[nn.Module], int] = {
    nn.LSTM: 4,
    nn.LSTMCell: 4,
    nn.GRU: 3,
    nn.GRUCell: 3,
    nn.RNN: 1,
    nn.RNNCell: 1,
}
_RECURRENT_WEIGHT = re.compile(r"weight_(ih|hh)(_l\d+)?(_reverse)?")


def by_shape(shape: tuple[int, ...], dtype: torch.dtype) -> RoleDecision | None:
    """Return what number type and number of dimensions alone settle, whoever owns the parameter.

    Args:
        shape: of the parameter.
        dtype: of the parameter.
    """
    if dtype.is_complex:
        return RoleDecision.elementwise("complex numbers")
    if len(shape) < 2:
        return RoleDecision.elementwise("a scalar" if not shape else "one dimension")
    return None


def by_module_type(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> RoleDecision | None:
    """Return what a known type of module says about its parameter; None for types that are not known.

    Args:
        module: the owner.
        attribute: the attribute that holds the parameter.
        shape: of the parameter.
    """
    if isinstance(module, _NORMS):
        return RoleDecision.elementwise(f"belongs to a norm ({type(module).__name__})")
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(module, attribute, shape)
    if isinstance(module, nn.MultiheadAttention):
        return _multihead_attention(module, attribute)
    return _weight(module) if attribute == "weight" else None


def _weight(module: nn.Module) -> RoleDecision | None:
    kind = type(module).__name__
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return RoleDecision.embedding(f"table of {kind}")
    if is_linear(module):
        return RoleDecision.matrix(f"weight of {kind}")
    if is_conv1d(module):
        return RoleDecision.matrix(f"weight of {kind}, stored [in, out]", MatrixView(transposed=True))
    if isinstance(module, _ConvNd):
        return _convolution(module)
    if isinstance(module, nn.Bilinear):
        return RoleDecision.matrix(f"weight of {kind}: [out, in1*in2] on the outer product of its inputs")
    return RoleDecision.elementwise("slope of PReLU") if isinstance(module, nn.PReLU) else None


def is_linear(module: nn.Module) -> bool:
    """True for `nn.Linear`, its subclasses, and layers that have its structure (`[out, in]`, `in_features`).

    Args:
        module: any module.
    """
    if isinstance(module, nn.Linear):
        return True
    weight = module._parameters.get("weight")
    if weight is None or torch.nn.parameter.is_lazy(weight) or weight.dim() != 2:
        return False
    return tuple(weight.shape) == (_stated(module, "out_features"), _stated(module, "in_features"))


def is_conv1d(module: nn.Module) -> bool:
    """True for the `Conv1D` of Hugging Face's GPT-2: a linear layer that stores `[in, out]`.

    Args:
        module: any module.
    """
    if not any(base.__name__ == "Conv1D" for base in type(module).__mro__):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[1] == _stated(module, "nf")


def _stated(module: nn.Module, name: str) -> int | None:
    """Return a size that a module states as an attribute of its own; no property is run."""
    size = module.__dict__.get(name, inspect.getattr_static(type(module), name, None))
    return size if isinstance(size, int) else None


def _convolution(module: _ConvNd) -> RoleDecision:
    kind, groups = type(module).__name__, module.groups
    if groups > 1 and groups == module.in_channels:
        return RoleDecision.elementwise(f"depthwise {kind}: every channel has its own filter")
    transposed = isinstance(module, _ConvTransposeNd)
    if groups > 1:
        sizes = ((module.in_channels if transposed else module.out_channels) // groups,) * groups
        view = MatrixView(
            transposed=transposed, split_dim=int(transposed), split_sizes=sizes, label="conv groups"
        )
        return RoleDecision.matrix(f"weight of {kind} in {groups} groups", view)
    if transposed:
        return RoleDecision.matrix(f"weight of {kind}, stored [in, out, ...]", MatrixView(transposed=True))
    return RoleDecision.matrix(f"weight of {kind}, seen as [out, in * kernel]")


def _recurrent(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> RoleDecision | None:
    kind = type(module).__name__
    if attribute.startswith("weight_hr"):
        return RoleDecision.matrix(f"projection of {kind}")
    if not _RECURRENT_WEIGHT.fullmatch(attribute):
        return None
    gates = next((count for base, count in _GATES.items() if isinstance(module, base)), None)
    if gates is None or shape[0] % gates:
        return RoleDecision.matrix(f"weight of {kind}").doubted("its gates are not known", Doubt.LAYOUT)
    if gates == 1:
        return RoleDecision.matrix(f"weight of {kind}")
    view = MatrixView(split_sizes=(shape[0] // gates,) * gates, label="gates")
    return RoleDecision.matrix(f"weight of {kind}, {gates} gates", view)


def _multihead_attention(module: nn.MultiheadAttention, attribute: str) -> RoleDecision | None:
    if attribute == "in_proj_weight":
        heads = (module.head_dim,) * 3
        view = MatrixView(split_sizes=(module.embed_dim,) * 3, label="qkv", fused=Fused.QKV, head_sizes=heads)
        return RoleDecision.matrix("q, k and v of MultiheadAttention", view)
    if attribute in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return RoleDecision.matrix(
            f"{attribute[0]} of MultiheadAttention", MatrixView(head_sizes=(module.head_dim,))
        )
    if attribute in ("bias_k", "bias_v"):
        return RoleDecision.elementwise("bias of MultiheadAttention")
    return None
