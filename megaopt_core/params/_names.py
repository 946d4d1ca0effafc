"""Canonical qualified names: what a parameter is called once wrappers are seen through."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import nn

__all__ = ["NamedParam", "ParamOwner", "named_modules", "named_params", "shown", "unwrap", "without_wrappers"]

type ParamOwner = tuple[str, nn.Module, str]
"""Canonical name of the owning module, the module, and the attribute that holds the parameter."""

_WRAPPERS = {
    # class name: (package that it must come from, child that it adds to names)
    "DistributedDataParallel": ("torch.nn.parallel", "module"),
    "DataParallel": ("torch.nn.parallel", "module"),
    "FullyShardedDataParallel": ("torch.distributed.fsdp", "_fsdp_wrapped_module"),
    "OptimizedModule": ("torch._dynamo", "_orig_mod"),
    "_BaseDataParallel": ("megatron.core", "module"),
    "Float16Module": ("megatron.core", "module"),
    "ActivationWrapper": ("torch.distributed.algorithms._checkpoint", "_checkpoint_wrapped_module"),
}


@frozen(eq=False)
class NamedParam:
    """A parameter under its canonical name.

    Args:
        name: canonical qualified name: the first under which the parameter is registered, without what wrappers
            add.
        param: the parameter.
        aliases: the other canonical names of the same tensor; not empty when it is tied.
        owners: every place that holds it, in registration order: `(module name, module, attribute)`.
        twins: other parameter objects that share its memory. Autograd gives each its own gradient.
    """

    name: str
    param: nn.Parameter
    aliases: tuple[str, ...]
    owners: tuple[ParamOwner, ...]
    twins: tuple[nn.Parameter, ...] = ()


def named_params(model: nn.Module) -> list[NamedParam]:
    """Return every parameter of a model once, in registration order, under its canonical name.

    Names are those of `model.named_parameters()` on the bare model: what `DistributedDataParallel`, `DataParallel`,
    `FullyShardedDataParallel`, `torch.compile` and activation-checkpoint wrappers add is left out, wherever in the
    model they stand. Parameters that share a tensor, or the same memory, are one entry with aliases.

    Args:
        model: any module, on any device, wrapped or not.

    Returns:
        One entry a parameter, frozen ones included.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5, bias=False))
        >>> model[1].weight = model[0].weight
        >>> [(entry.name, entry.aliases) for entry in named_params(torch.nn.DataParallel(model))]
        [('0.weight', ('1.weight',))]
    """
    places: dict[object, list[tuple[ParamOwner, nn.Parameter]]] = {}
    for module_name, module in named_modules(model):
        for attribute, param in module._parameters.items():
            if param is not None:
                places.setdefault(_identity(param), []).append(((module_name, module, attribute), param))
    entries = []
    for found in places.values():
        owners = tuple(owner for owner, _ in found)
        name, *aliases = dict.fromkeys(join(module_name, attribute) for module_name, _, attribute in owners)
        param, *twins = {id(param): param for _, param in found}.values()
        entries.append(NamedParam(name, param, tuple(aliases), owners, tuple(twins)))
    return entries


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under its canonical name, parents first; a wrapper shares the name of what it wraps.

    A module that is registered in two places is yielded under both names.

    Args:
        model: the root, whose name is empty.

    Example:
        >>> import torch
        >>> [name for name, _ in named_modules(torch.nn.Sequential(torch.nn.Linear(1, 1)))]
        ['', '0']
    """
    stack: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", model, ())]
    while stack:
        name, module, ancestors = stack.pop()
        yield name, module
        if not module._modules:
            continue
        added = _added_child(module)
        below = (*ancestors, id(module))
        for child_name, child in reversed(module._modules.items()):
            if child is not None and id(child) not in below:  # a module may hold its own parent
                stack.append((name if child_name == added else join(name, child_name), child, below))


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside of any number of wrappers that :func:`named_params` sees through.

    Args:
        module: a wrapper, or any module.

    Example:
        >>> import torch
        >>> type(unwrap(torch.nn.DataParallel(torch.nn.Linear(1, 1)))).__name__
        'Linear'
    """
    while (added := _added_child(module)) is not None:
        child = module._modules.get(added)
        if child is None:
            break
        module = child
    return module


def without_wrappers(name: str) -> str:
    """Return a name of a model's state dict without what wrappers add to names.

    Args:
        name: the name; modules of the model that are called as a wrapper's child is lose theirs too.

    Example:
        >>> without_wrappers("module._orig_mod.head.weight")
        'head.weight'
    """
    added = {child for _, child in _WRAPPERS.values()}
    return ".".join(part for part in name.split(".") if part not in added)


def join(prefix: str, name: str) -> str:
    """Return a dotted name.

    Args:
        prefix: may be empty.
        name: what follows.
    """
    return f"{prefix}.{name}" if prefix else name


_added_by_class: dict[type, str | None] = {}


def _added_child(module: nn.Module) -> str | None:
    """Return the child that a wrapper adds to the names below it, None when the module is no wrapper."""
    kind = type(module)
    if kind not in _added_by_class:
        added = "module" if getattr(kind, "megaopt_wrapper", False) else None
        for base in kind.__mro__:
            package, child = _WRAPPERS.get(base.__name__, ("", None))
            if child is not None and base.__module__.startswith(package):
                added = child
        _added_by_class[kind] = added
    return _added_by_class[kind]


def _identity(param: nn.Parameter) -> object:
    """Return what two tied parameters have in common: the memory, or the object where there is none to compare."""
    if type(param) is not nn.Parameter and not isinstance(param, nn.Parameter):
        return id(param)
    try:
        storage = param.untyped_storage()
        if torch.nn.parameter.is_lazy(param) or param.numel() == 0 or type(param.data) is not torch.Tensor:
            return id(param)
        if param.device.type != "meta" and storage.nbytes() == 0:
            return id(param)
        return (storage._cdata, param.storage_offset(), param.numel())
    except (RuntimeError, NotImplementedError, ValueError):
        return id(param)


def shown(names: tuple[str, ...] | list[str], most: int = 5) -> str:
    """Return the first names of a list as errors and reports say them, and how many more there are.

    Args:
        names: the names.
        most: how many to show.

    Example:
        >>> shown(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
