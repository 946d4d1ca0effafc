"""The role of a layer or a bare parameter where no forward was watched: conventions that nearly all models keep."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.params import RoleDecision
from megaopt_core.routing import doubted, elementwise, is_conv1d, matrix, output
from megaopt_roles.libraries import Told
from megaopt_roles.structure import Structure, is_layer, outputs_of, takes_of

__all__ = ["Conventions"]

_HEAD = re.compile(r"(^|_)(heads?|classifiers?|scores?|logits|exits?)$")
_TABLE_NAME = re.compile(
    r"pos(ition)?s?(_|$)|_pos(_|$)|rel_|relative|token(?!s)|cls|mask|regist|quer(y|ies)|gamma|scale|bias|gain|temperature"
)
_FUSED_NAME = re.compile(
    r"(^|[._])(w?qkvs?|kv|qk|q_?kv|query_key_value|in_proj|gate_up(_proj)?|c_attn|x_proj|kv_a(_proj\w*)?"
    r"|\w*mod(ulations?)?|film\w*|ada_?ln\w*|scale_(bias|shift)\w*|(time_)?emb_(proj|layers)|context_mlp|pointwise_conv1)([._]|$)"
)
_FACTOR = re.compile(r"(^|\.)(\w+_)?[AB](\.|$)")
"""The name of one of two factors, as `lora_A.default`."""
_FEW = 4
"""Features that are too few for a hidden layer."""
_BLOCKS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_SQUASHES = (nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax)


class Conventions:
    """The conventions of one model.

    Args:
        structure: of the model.
        told: what the classes of libraries say of it.
        marked: the model marks its embedding and output parameters.
    """

    def __init__(self, structure: Structure, told: Told, *, marked: bool) -> None:
        self.structure, self.told, self.marked = structure, told, marked

    def certain(self, name: str, module: nn.Module) -> RoleDecision | None:
        """Return what a model's marks and libraries say of a layer, which no forward overrules; None: nothing.

        Args:
            name: of the layer.
            module: the layer.
        """
        if self.marked:
            return matrix("the model marks its embedding and output, and this is neither")
        if is_conv1d(module):
            return matrix(f"weight of {type(module).__name__}")
        if any(isinstance(self.structure.modules[above], _BLOCKS) for above in self.structure.above(name)):
            return matrix("part of torch's own attention or transformer layer")
        headed = self._head_part(name)
        if self.told.getter_asked and headed is None:
            return matrix("get_classifier does not return it")
        if headed is None and self.told.is_inside(name):
            few = outputs_of(module) <= _FEW and not _is_factor(name)
            ends = few or self._has_most_rows(module)
            return None if ends and self.structure.block_of(name) is None else matrix("inside the base model")
        return None

    def layer(self, name: str, module: nn.Module) -> RoleDecision:
        """Return what a layer is by convention.

        Args:
            name: of the layer.
            module: the layer.
        """
        block, outs = self.structure.block_of(name), outputs_of(module)
        rows = [table for table in self.structure.tables if self._has_rows_of(module, table)]
        if block is None and self._has_most_rows(module):
            return output("as many rows as the largest embedding")
        headed = self._head_part(name)
        small = outs <= _FEW and not _is_factor(name) and isinstance(module, nn.Linear)
        if block is not None and headed is None and (not small or self.told.is_inside(name)):
            return matrix(f"in the repeated block {block}")
        taker = None if self._is_squashed(name) else self._taker(name, module, headed)
        if taker is not None:
            return matrix(f"{taker} takes its {outs} features")
        if rows:
            return output("as many rows as an embedding")
        if self._taker(name, module, None) is None and not self.told.is_inside(name):
            if self._head_part(name) is not None:
                return output("a head's name, and no layer takes its features")
            if self._is_last(name):
                return output("the last layer of a Sequential model")
        return doubted(output("no later layer takes its features"))

    def bare(
        self, owner: tuple[str, nn.Module, str], shape: tuple[int, ...], *, adapted: bool
    ) -> RoleDecision:
        """Return what a parameter is that no known module owns.

        Args:
            owner: name of its module, the module, and its attribute.
            shape: of the parameter.
            adapted: it is a factor of a hidden layer.
        """
        _, module, attribute = owner
        name = f"{owner[0]}.{attribute}"
        if attribute in ("lora_A", "lora_B") and self._head_part(owner[0]) is None:
            adapted |= not any(isinstance(part, nn.Embedding) for part in module.modules())
        if adapted:
            if len(shape) == 2 and _FACTOR.search(name):
                return matrix("a low-rank factor of a hidden layer")
        elif 1 in shape if len(shape) == 2 else shape[0] == 1 and len(shape) in (3, 4):
            return elementwise("a side of one")
        if len(shape) == 2 and (_TABLE_NAME.search(attribute) or attribute in ("A_log", "D")):
            return elementwise(f"{attribute}: the name of a table, token, bias or gain")
        why = f"{attribute} of {type(module).__name__}: no convention says how it is used"
        return doubted(elementwise(why))

    def may_be_fused(self, name: str, module: nn.Module) -> bool:
        """Return whether a layer may hold several matrices: it gives more features than are taken in its block.

        Args:
            name: of the layer.
            module: the layer.
        """
        outs = outputs_of(module)
        if _FUSED_NAME.search(name):
            return True
        if isinstance(module, _ConvNd):
            return False
        scope = self.structure.block_of(name)
        takes: set[int] = set()
        for other, layer in self.structure.layers.items():
            if layer is not module and (scope is None or other.startswith(f"{scope}.")):
                takes |= takes_of(layer)
        if not takes or outs in takes | takes_of(module) or outs <= _FEW:
            return False
        return any(_FEW < taken < outs for taken in takes) and outs > max(takes_of(module), default=0)

    def _head_part(self, name: str) -> str | None:
        """Return the outermost part of a layer's path, down to its block, that has a head's name."""
        path = (self.structure.block_of(name) or name).split(".")
        for index, part in enumerate(path):
            if _HEAD.search(part.lower()):
                return ".".join(path[: index + 1])
        return None

    def _has_most_rows(self, module: nn.Module) -> bool:
        """Return whether a layer has as many rows as the largest embedding."""
        largest = max(self.structure.tables, key=lambda table: table.num_embeddings, default=None)
        return largest is not None and self._has_rows_of(module, largest)

    @staticmethod
    def _has_rows_of(module: nn.Module, table: nn.Embedding | nn.EmbeddingBag) -> bool:
        outs, rows = outputs_of(module), table.num_embeddings
        linear = not isinstance(module, _ConvNd) and outs > _FEW
        return bool(linear and outs == rows and rows != table.embedding_dim)

    def _taker(self, name: str, module: nn.Module, headed: str | None) -> str | None:
        """Return a later layer that takes as many features as a layer gives, or a half, a third or a quarter."""
        outs, parent = outputs_of(module), name.rpartition(".")[0]
        if outs <= _FEW:
            return None
        lists = nn.ModuleList | nn.ModuleDict
        parallel = headed is not None and isinstance(self.structure.modules[parent], lists)
        at = self.structure.order[name]
        for other, layer in self.structure.layers.items():
            if self.structure.order[other] <= at or layer is module:
                continue
            if parallel and other.rpartition(".")[0] == parent:
                continue
            if any(
                outs == taken or (taken > _FEW and outs / taken in (2, 3, 4)) for taken in takes_of(layer)
            ):
                return other
        return None

    def _is_squashed(self, name: str) -> bool:
        """Return whether a tanh, sigmoid or softmax that ends a Sequential follows a layer."""
        parent = name.rpartition(".")[0]
        children = self.structure.children(parent)
        ends = isinstance(self.structure.modules[parent], nn.Sequential) and len(children) > 1
        return ends and children[-2][0] == name and isinstance(children[-1][1], _SQUASHES)

    def _is_last(self, name: str) -> bool:
        """Return whether a layer ends a model that is one Sequential of several layers, or holds nothing else."""
        top, modules = "", self.structure.modules
        while not isinstance(modules[top], nn.Sequential):
            full = [
                (n, child)
                for n, child in self.structure.children(top)
                if any(True for _ in child.parameters())
            ]
            if len(full) != 1 or modules[top]._parameters or isinstance(modules[top], nn.ModuleList):
                return False
            top = full[0][0]
        children = self.structure.children(top)
        return name == children[-1][0] and any(is_layer(child) for _, child in children[:-1])


def _is_factor(name: str) -> bool:
    return re.search(r"(^|\.)lora_[AB](\.|$)", name) is not None
