"""The role of a layer or a bare parameter where no forward was watched: conventions that nearly all models keep."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.params import RoleDecision
from megaopt_roles.libraries import Told
from megaopt_roles.structure import (
    Structure,
    is_depthwise,
    is_layer,
    norm_width,
    outputs_of,
    takes_of,
)
from megaopt_roles.torch_modules import is_conv1d

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
            return RoleDecision.matrix("the model marks its embedding and output, and this is neither")
        if is_conv1d(module):
            return RoleDecision.matrix(f"weight of {type(module).__name__}")
        if any(isinstance(self.structure.modules[above], _BLOCKS) for above in self.structure.above(name)):
            return RoleDecision.matrix("part of torch's own attention or transformer layer")
        headed = self._head_part(name)
        if self.told.getter_asked and headed is None:
            return RoleDecision.matrix("get_classifier does not return it")
        if headed is None and self.told.is_inside(name):
            few = outputs_of(module) <= _FEW and not _is_factor(name)
            heads = self._has_most_rows(module) and self.structure.block_of(name) is None
            return None if few or heads else RoleDecision.matrix("inside the base model")
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
            found = RoleDecision.output("as many rows as the largest embedding")
            taken = any(outs in takes_of(layer) for layer in self.structure.inside(""))
            return found.doubted("and a layer takes as many features") if taken else found
        headed = self._head_part(name)
        small = outs <= _FEW and not _is_factor(name) and isinstance(module, nn.Linear)
        if block is not None and headed is None and not small:
            return RoleDecision.matrix(f"in the repeated block {block}")
        taker = None if self._is_squashed(name) else self._taker(name, module, headed)
        if taker is not None:
            whole = outs in takes_of(self.structure.modules[taker])
            return RoleDecision.matrix(f"{taker} takes {'its' if whole else 'a part of its'} {outs} features")
        if rows:
            return RoleDecision.output("as many rows as an embedding")
        if self._taker(name, module, None) is None and not self.told.is_inside(name):
            if self._head_part(name) is not None:
                return RoleDecision.output("a head's name, and no layer takes its features")
            if self._is_last(name):
                return RoleDecision.output("the last layer of a Sequential model")
        return RoleDecision.output("no later layer takes its features").doubted()

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
                return RoleDecision.matrix("a low-rank factor of a hidden layer")
        elif 1 in shape if len(shape) == 2 else shape[0] == 1 and len(shape) in (3, 4):
            return RoleDecision.elementwise("one of its dimensions is 1")
        if len(shape) == 2 and (_TABLE_NAME.search(attribute) or attribute in ("A_log", "D")):
            return RoleDecision.elementwise(f"{attribute}: the name of a table, token, bias or gain")
        why = f"{attribute} of {type(module).__name__}: no convention says how it is used"
        return RoleDecision.elementwise(why).doubted()

    def may_be_fused(self, name: str, module: nn.Module) -> bool:
        """Return whether a layer may hold several matrices: no layer near it takes its features, but some take a part.

        Near are first the layers beside it, then those around, up to its block. Of convolutions only the next one
        counts, since the first one of a stage gives twice as many features as others of its block take. A layer that is
        alone with norms modulates what they give.

        Args:
            name: of the layer.
            module: the layer.
        """
        if _FUSED_NAME.search(name):
            return True
        outs, own = outputs_of(module), takes_of(module)
        if outs <= _FEW or is_depthwise(module):
            return False
        convolves, widens = isinstance(module, _ConvNd), outs > max(own, default=0)
        parent, block = name.rpartition(".")[0], self.structure.block_of(name) or ""
        taken = set[int]()
        for scope in self.structure.above(name):
            others = [layer for layer in self.structure.inside(scope) if layer is not module]
            taken = set[int]().union(*map(takes_of, others))
            if outs in taken:
                return False
            if convolves:
                alike = any(outputs_of(layer) == outs for layer in others)
                others = [] if alike else self.structure.after(scope, module)[:1]
            elif outs in own or not (widens or scope == parent):
                others = []
            parts = {part for layer in others if outputs_of(layer) != outs for part in takes_of(layer)}
            if any(
                _is_part(outs, part) for part in parts or (self._norms(scope, module) if not taken else ())
            ):
                return True
            if scope == block:
                break
        return widens and not convolves and any(_FEW < part < outs for part in taken)

    def _norms(self, scope: str, module: nn.Module) -> set[int]:
        """Return the widths of the norms that follow a layer in its module."""
        children = [child for _, child in self.structure.children(scope)]
        after = children[children.index(module) :] if module in children else []
        return {width for child in after if (width := norm_width(child))}

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


def _is_part(outs: int, taken: int) -> bool:
    """Return whether features are two, three, four or six times as many as those that something takes."""
    return taken > _FEW and outs % taken == 0 and outs // taken in (2, 3, 4, 6)


def _is_factor(name: str) -> bool:
    return re.search(r"(^|\.)lora_[AB](\.|$)", name) is not None
