"""What the core needs of a model's wrapper: it knows no class of one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import ClassVar, Protocol, final, runtime_checkable

import torch
from attrs import frozen

from megaopt_core.errors import ShardingError, UnsupportedOperationError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.sharding._layout import FullParamLayout

__all__ = [
    "FoundWrapper",
    "ReducedBy",
    "WrappedModel",
    "finish_grad_sync",
    "found_wrappers",
    "known_wrappers",
    "reducer_of",
    "require_whole_grads",
    "wrappers_of",
]


@runtime_checkable
class WrappedModel(Protocol):
    """A model chunk whose gradients lie in buffers and are reduced there; `megaopt-distributed` has one.

    Whatever has these members is one; torch's own `DistributedDataParallel` is none, and needs none. It is found where
    it is a model chunk or a module inside of one. One that also sets `reduced_by`, a :class:`ReducedBy`, on every
    parameter that it gives `main_grad` is found from its parameters too: by an optimizer of the bare model, and where
    it is made after the optimizer.
    """

    @property
    def process_groups(self) -> ProcessGroupCollection:
        """The ranks over which gradients are reduced."""

    @property
    def full_param_layout(self) -> FullParamLayout:
        """Where parameters lie in the buffers, and the routing that this was planned for."""

    @property
    def scatters_grads(self) -> bool:
        """True where a gradient is reduced to one rank, not to all."""

    @property
    def forward_waits(self) -> bool:
        """True where parameters may still be on their way when the forward pass begins."""

    def finish_grad_sync(self) -> None:
        """Return when all gradients are reduced."""

    def finish_param_sync(self) -> None:
        """Return when all parameters have arrived."""

    def zero_grad_buffer(self) -> None:
        """Fill all gradients with zeros."""


@final
class ReducedBy:
    """Says whose `finish_grad_sync` reduces a parameter's `main_grad`: the attribute `reduced_by` of the parameter.

    The wrapper is not kept alive. A copy, pickled or not, names nobody.

    Args:
        wrapper: the wrapper; None: nobody.
    """

    __slots__ = ("_wrapper",)
    made: ClassVar[int] = 0
    """How many have named a wrapper in this process: what was seen of a model holds until there is a new one."""

    def __init__(self, wrapper: WrappedModel | None = None) -> None:
        ReducedBy.made += wrapper is not None
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    def __call__(self) -> WrappedModel | None:
        """Return the wrapper, None when it is gone."""
        return None if self._wrapper is None else self._wrapper()

    def __reduce__(self) -> tuple[type[ReducedBy], tuple[()]]:
        return (ReducedBy, ())


def reducer_of(param: torch.nn.Parameter) -> WrappedModel | None:
    """Return the wrapper that has put its mark on a parameter, None where nobody says who reduces its gradient.

    Whatever else puts `main_grad` on parameters answers by the same mark: see :class:`ReducedBy`. Without an answer
    replicas compare `main_grad` in the first step, and :func:`require_whole_grads` looks at the wrapper.

    Args:
        param: the parameter.
    """
    mark: ReducedBy | None = getattr(param, "reduced_by", None)
    return None if mark is None else mark()


def require_whole_grads(chunks: Iterable[torch.nn.Module]) -> None:
    """Raise where a wrapper that nobody reads leaves each rank its share of the gradients, as Megatron-core's does.

    Args:
        chunks: the model chunks.

    Raises:
        ShardingError: a wrapper's `ddp_config` says so, and nobody says who reduces its parameters' gradients.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        scatters = getattr(getattr(module, "ddp_config", None), "use_distributed_optimizer", False)
        if not scatters or isinstance(module, WrappedModel):
            continue
        params = (param for param in module.parameters() if getattr(param, "main_grad", None) is not None)
        if any(reducer_of(param) is None for param in params):
            kind = type(module)
            raise ShardingError(
                f"the model is wrapped in {kind.__module__}.{kind.__name__} with use_distributed_optimizer=True, which "
                "gives each rank a share of the gradients; this function does not know which. For Megatron-core, call "
                "megaopt_trainers.megatron.get_megatron_optimizer. For others, wrap the model with "
                "use_distributed_optimizer=False (sharding='distributed' and 'layer_wise' still shard the optimizer), "
                "or in megaopt's DistributedDataParallel"
            )


@frozen(eq=False)
class FoundWrapper:
    """A wrapper that reduces gradients of a chunk.

    Args:
        wrapper: the wrapper.
        is_covered: the chunk has all parameters of the wrapper: it is the wrapper, holds it, or is the model in it.
    """

    wrapper: WrappedModel
    is_covered: bool


_looked: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, list[tuple[weakref.ref[WrappedModel], bool]]]]
_looked = weakref.WeakKeyDictionary()
"""What was found in a chunk, and how many marks there were then."""


def known_wrappers(chunk: torch.nn.Module | None) -> list[FoundWrapper]:
    """Return what :func:`found_wrappers` does; it looks again only where a wrapper has been made since it did.

    Args:
        chunk: the model chunk; None: none.
    """
    if chunk is None:
        return []
    made, found = _looked.get(chunk, (-1, []))
    if made != ReducedBy.made:
        found = [(weakref.ref(one.wrapper), one.is_covered) for one in found_wrappers(chunk)]
        _looked[chunk] = ReducedBy.made, found
    return [
        FoundWrapper(wrapper, is_covered)
        for reference, is_covered in found
        if (wrapper := reference()) is not None
    ]


def found_wrappers(chunk: torch.nn.Module | None) -> list[FoundWrapper]:
    """Return who reduces gradients of a chunk: itself, modules inside of it, and those whose mark its parameters carry.

    A wrapper inside of another is none of them, unless its mark is on a parameter.

    Args:
        chunk: the model chunk; None: none.
    """
    outermost: dict[int, WrappedModel] = {}
    marked: dict[int, tuple[WrappedModel, set[int]]] = {}
    stack = [] if chunk is None else [chunk]
    below: list[torch.nn.Module] = []
    params: list[torch.nn.Parameter | None] = []
    seen: set[torch.nn.Module | None] = {None}
    while stack or below:
        is_outside = bool(stack)
        module = stack.pop() if is_outside else below.pop()
        if module in seen:
            continue
        seen.add(module)
        if own := module._parameters:
            params += own.values()
        if is_outside and (type(module) not in _no_wrappers or module is chunk) and _is_wrapper(module):
            outermost[id(module)] = module  # type: ignore[assignment] # it has all the members
            is_outside = False
        if children := module._modules:
            new = [child for child in reversed(children.values()) if child is not None]
            (stack if is_outside else below).extend(new)
    for param in params:
        if (
            param is not None
            and "reduced_by" in param.__dict__
            and (reducer := reducer_of(param)) is not None
        ):
            marked.setdefault(id(reducer), (reducer, set()))[1].add(id(param))
    found = [FoundWrapper(wrapper, is_covered=True) for wrapper in outermost.values()]
    for key, (wrapper, theirs) in marked.items():
        if key not in outermost:
            buffers = wrapper.full_param_layout.buffers.values()
            found.append(
                FoundWrapper(wrapper, len(theirs) == sum(len(buffer.param_ranges) for buffer in buffers))
            )
    return found


_no_wrappers: set[type] = set()
"""Classes of modules of which none inside of a chunk is a wrapper."""


def _is_wrapper(module: torch.nn.Module) -> bool:
    if isinstance(module, WrappedModel):
        return True
    if not hasattr(type(module), "finish_grad_sync"):
        _no_wrappers.add(type(module))
    return False


def wrappers_of(
    chunks: Iterable[torch.nn.Module | None], params: Iterable[torch.nn.Parameter] = ()
) -> list[WrappedModel]:
    """Return every wrapper that reduces gradients of a model once, in one order on all ranks that hold the same model.

    Args:
        chunks: the model chunks: wrapped, with wrappers inside, or bare.
        params: further parameters, whose marks are looked at.
    """
    found = [one.wrapper for chunk in chunks for one in found_wrappers(chunk)]
    found += [wrapper for param in params if (wrapper := reducer_of(param)) is not None]
    return list({id(wrapper): wrapper for wrapper in found}.values())


def finish_grad_sync(chunks: Iterable[torch.nn.Module], params: Iterable[torch.nn.Parameter] = ()) -> None:
    """Wait until the gradients of wrapped chunks are reduced; chunks that megaopt does not wrap are left alone.

    Args:
        chunks: the model chunks; their wrappers may be inside of them, or around them.
        params: further parameters whose wrappers are waited for, the same ones in the same order on all ranks.

    Raises:
        UnsupportedOperationError: a wrapper that only `params` tell of scatters gradients; nobody has planned for it.
    """
    planned = {id(one.wrapper): one.wrapper for chunk in chunks for one in known_wrappers(chunk)}
    for wrapper in planned.values():
        wrapper.finish_grad_sync()
    for wrapper in wrappers_of((), params):
        if id(wrapper) in planned:
            continue
        wrapper.finish_grad_sync()
        if wrapper.scatters_grads:
            raise UnsupportedOperationError(
                f"{type(wrapper).__name__} scatters gradients over ranks (use_distributed_optimizer=True), "
                "but this optimizer steps whole parameters without a model: use build_optimizer or "
                "get_megatron_optimizer, or wrap the model with use_distributed_optimizer=False"
            )
