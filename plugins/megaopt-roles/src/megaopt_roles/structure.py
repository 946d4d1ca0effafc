"""The places of a model's modules: their names, parents and repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megaopt_core.params import named_modules
from megaopt_roles.torch_modules import is_conv1d, is_linear

__all__ = ["Structure", "is_a", "is_depthwise", "is_layer", "norm_width", "outputs_of", "takes_of"]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def is_a(module: nn.Module, *names: str) -> bool:
    """Return whether the class of a module, or a base of it, has one of these qualified names, or lies in a package.

    Args:
        module: the module.
        names: qualified names; one that ends with a dot is a package.
    """
    kind: Any = type(module)
    return _class_is_a(kind, names)


@cache
def _class_is_a(kind: Any, names: tuple[str, ...]) -> bool:
    paths = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return any(
        path == name or (name[-1] == "." and path.startswith(name)) for path in paths for name in names
    )


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer: linear, by its class or its structure, or a convolution.

    Args:
        module: the module.
    """
    if isinstance(module, _ConvNd) or is_linear(module) or is_conv1d(module):
        return True
    weight = module._parameters.get("weight")
    return type(module).__name__.endswith("Linear") and weight is not None and weight.dim() == 2


def outputs_of(module: nn.Module) -> int:
    """Return how many features a layer gives.

    Args:
        module: the layer.
    """
    if isinstance(module, _ConvNd):
        return module.out_channels
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module._parameters.get("weight_v")
    if isinstance(module, nn.Linear) or weight is None:
        return int(getattr(module, "out_features", 0))
    return weight.shape[1 if is_conv1d(module) else 0]


def takes_of(module: nn.Module) -> set[int]:
    """Return how many features a module takes; none where its type does not say.

    Args:
        module: any module.
    """
    if isinstance(module, _ConvNd):
        return {module.in_channels}
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return {module.input_size}
    if isinstance(module, nn.MultiheadAttention):
        return {module.embed_dim, module.kdim, module.vdim}
    if isinstance(module, nn.Bilinear):
        return {module.in1_features, module.in2_features}
    if isinstance(module, nn.Linear):
        return {module.in_features}
    weight = module._parameters.get("weight")
    if weight is None or not is_layer(module):
        return set()
    return {weight.shape[0 if is_conv1d(module) else 1]}


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a convolution filters every channel by itself.

    Args:
        module: any module.
    """
    return isinstance(module, _ConvNd) and module.groups == module.in_channels > 1


def norm_width(module: nn.Module) -> int:
    """Return how many features a norm takes; 0 for everything else.

    Args:
        module: any module.
    """
    if "Norm" not in type(module).__name__:
        return 0
    shape: Any = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and shape:
        return int(shape[-1])
    width = getattr(module, "num_features", getattr(module, "num_channels", 0))
    weight = module._parameters.get("weight")
    return width if (isinstance(width, int) and width) or weight is None else weight.numel()


class Structure:
    """The modules of a model by name.

    Args:
        model: the model, unwrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(named_modules(model))
        self.order = {name: index for index, name in enumerate(self.modules)}

    @staticmethod
    def above(name: str) -> Iterator[str]:
        """Yield the names of the modules that a module stands in, nearest first.

        Args:
            name: of the module.
        """
        while name:
            name = name.rpartition(".")[0]
            yield name

    @cached_property
    def tables(self) -> list[nn.Embedding | nn.EmbeddingBag]:
        """The embeddings."""
        return [module for module in self.modules.values() if isinstance(module, _TABLES)]

    @cached_property
    def layers(self) -> dict[str, nn.Module]:
        """The modules that take features, in order: layers, recurrent ones, attention, bilinear ones."""
        return {name: module for name, module in self.modules.items() if takes_of(module)}

    @cached_property
    def _inside(self) -> dict[str, list[nn.Module]]:
        found: dict[str, list[nn.Module]] = {}
        for name, module in self.layers.items():
            for above in self.above(name) if not is_depthwise(module) else ():
                found.setdefault(above, []).append(module)
        return found

    def inside(self, scope: str) -> list[nn.Module]:
        """Return the layers inside a module, in order; depthwise convolutions, which pass features on, are left out.

        Args:
            scope: name of the module.
        """
        return self._inside.get(scope, [])

    def after(self, scope: str, module: nn.Module) -> list[nn.Module]:
        """Return the layers inside a module that come after one of them.

        Args:
            scope: name of the module.
            module: the layer that they follow.
        """
        layers = self.inside(scope)
        at = next(index for index, layer in enumerate(layers) if layer is module)
        return layers[at + 1 :]

    @cached_property
    def blocks(self) -> set[str]:
        """Names of the repeated blocks: children of a list that holds at least two of their class."""
        found = set()
        for name, module in self.modules.items():
            if not isinstance(module, _LISTS):
                continue
            children = {key: child for key, child in module._modules.items() if child is not None}
            kinds = [type(child) for child in children.values()]
            for key, child in children.items():
                repeated = kinds.count(type(child)) > 1
                if repeated and not is_layer(child) and not isinstance(child, _TABLES) and _has_params(child):
                    found.add(f"{name}.{key}" if name else key)
        return found

    def base_of(self, name: str, module: nn.Module, factor: nn.Parameter) -> nn.Parameter | None:
        """Return the weight of which a matrix is a low-rank factor: a module holds it, another factor and no more.

        Args:
            name: of the module that owns the matrix.
            module: that module.
            factor: the matrix.
        """
        if is_layer(module) or isinstance(module, _TABLES):
            name = name.rpartition(".")[0]
        if not name or isinstance(self.modules[name], _LISTS):
            return None
        holders = (self.modules[name], *(child for _, child in self.children(name)))
        weights = {param for holder in holders for param in holder._parameters.values() if param is not None}
        matrices = [param for param in weights if param.dim() == 2 and min(param.shape) > 1]
        base = max(matrices, key=torch.numel, default=factor)
        if len(matrices) != 3 or base is factor or not any(param is factor for param in matrices):
            return None
        one, other = (param.shape for param in matrices if param is not base)
        ranks = {r for r in {*one} & {*other} if r < min(base.shape)}
        fits = any(sorted((*one, *other)) == sorted((r, r, *base.shape)) for r in ranks)
        every = self.modules[name].parameters() if fits else ()
        return base if sum(param.dim() > 1 and min(param.shape) > 1 for param in every) == 3 else None

    def block_of(self, name: str) -> str | None:
        """Return the innermost repeated block that a module stands in.

        Args:
            name: of the module.
        """
        return next((above for above in self.above(name) if above in self.blocks), None)

    def children(self, name: str) -> list[tuple[str, nn.Module]]:
        """Return the children of a module in order, by full name.

        Args:
            name: of the module.
        """
        own = self.modules[name]._modules.items()
        return [(f"{name}.{key}" if name else key, child) for key, child in own if child is not None]


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
