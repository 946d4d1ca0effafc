"""The one door to an optimizer's state: slices of named parameters' states, listed, read and written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from megaopt_core.errors import StateDictError
from megaopt_core.execution._placeholders import is_placeholder
from megaopt_core.params._shards import Shard
from megaopt_core.plugin_api._observers import Change
from megaopt_core.state._fitting import fits

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = ["NamedState", "StateSlice"]


@frozen(eq=False)
class StateSlice:
    """What this rank keeps of one state of one parameter.

    Args:
        name: canonical name of the parameter, the same on every rank and under every strategy.
        key: the state's key, such as `"exp_avg"`; `"main_param"` is the main value that a precision policy keeps.
        shard: which elements of the parameter it is about: `shape` is that of the whole parameter, `box` is
            `(offsets, sizes)` of the part that this rank has, `start` and `stop` a row-major range inside that box.
        is_elementwise: the state has one element for each of the shard's; else it is one value for the parameter, such
            as a step count, or a value of a shape of its own.
        is_fresh: it stands in, as zeros, for what the first step will make. A save leaves it out; a value that a load
            writes into it is used in place of what the step would have made.
    """

    name: str
    key: str
    shard: Shard
    is_elementwise: bool
    is_fresh: bool
    _kept: Any = field(repr=False)

    def read(self) -> Any:
        """Return the value: the shard's elements, flat, in float32 where they are stored in codes; or the one value.

        A tensor may share the optimizer's memory: copy what is kept beyond the next step.
        """
        value = self._kept.read(self.key)
        return value.detach().reshape(-1) if self.is_elementwise else value


@frozen(eq=False)
class NamedState:
    """The state of an optimizer by the names of its parameters, as far as this rank keeps it.

    It is what a library of checkpoints works on. A save writes, on each rank, `name`, `key`, `shard`, `is_elementwise`
    and `read()` of each slice. It leaves out slices that are `is_fresh`: their zeros are no values. A load looks for
    the elements of each slice of the optimizer that is there then, which may be cut otherwise, and gives all of them to
    :meth:`write` at once. Slices of several ranks with the same `name`, `key` and elements hold the same values.

    Settings are no slices. `optimizer.param_groups` has them beside `params`, whose names `optimizer.names` gives; a
    load sets keys of these dicts and does not replace the dicts. `optimizer.grad_scaler` has a state dict of its own,
    where it is not None.

    `with optimizer.step_lock.saving():` keeps steps of other threads away from a save. Neither method communicates.

    Args:
        optimizer: a built optimizer.

    Example:
        >>> import torch
        >>> from megaopt_core import build_optimizer
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = build_optimizer(model, "adam", lr=1e-3)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> _ = optimizer.step()
        >>> [(part.name, part.key, part.shard.numel) for part in optimizer.named_state().slices()]
        [('weight', 'step', 2), ('weight', 'exp_avg', 2), ('weight', 'exp_avg_sq', 2)]
    """

    optimizer: StatefulOptimizer

    def slices(self) -> list[StateSlice]:
        """Return what this rank keeps, parameter by parameter; one has several slices where it is stepped in pieces."""
        names, found = self.optimizer.names, []
        for param, state in self.optimizer.state.items():
            for position, kept in enumerate(state.slices):
                for key in kept.keys():  # noqa: SIM118 - it is no mapping
                    of_owner = not kept.piece.holds(key)
                    if of_owner and position:
                        continue  # an owner keeps it once, however many pieces are stepped here
                    owner = kept.owned if of_owner else kept.piece
                    shard = kept.owned.members[0][1] if of_owner else kept.shard
                    elementwise = (
                        owner.is_elementwise(key, owner.inner.get(key))
                        if of_owner
                        else kept.is_elementwise(key)
                    )
                    fresh = key in owner.inner and is_placeholder(owner.inner)
                    found.append(StateSlice(names[param], key, shard, elementwise, fresh, kept))
        return found

    def write(self, values: Iterable[tuple[StateSlice, Any]]) -> None:
        """Write values into the slices that :meth:`slices` returned, after all of them have been checked.

        Load the model's own values before: main values that are written here hold over them.

        Args:
            values: slices and what they become: flat elements of any dtype, or the one value.

        Raises:
            StateDictError: a value is of another size or kind; nothing has been changed.
        """
        pairs = list(values)
        for part, value in pairs:
            size = value.numel() if part.is_elementwise and isinstance(value, torch.Tensor) else None
            if part.is_elementwise and size != part.shard.numel:
                given = f"{size} elements" if size is not None else f"a {type(value).__name__}"
                raise StateDictError(
                    f"state {part.key!r} of {part.name!r} takes {part.shard.numel} elements here, got {given}",
                    names=[part.name],
                )
            if not part.is_elementwise and not fits(part.read(), value):
                raise StateDictError(
                    f"state {part.key!r} of {part.name!r} is {part.read()!r} here and cannot become {value!r}",
                    names=[part.name],
                )
        with self.optimizer.changing(Change.LOADED):  # the model may have been loaded by somebody else
            for part, value in pairs:
                is_whole = part.is_elementwise and part._kept.is_param and part._kept.piece.holds(part.key)
                part._kept.write(
                    part.key, value.reshape(part._kept.piece.stepped.shape) if is_whole else value
                )
