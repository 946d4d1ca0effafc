"""Parameters that begin to train after the build: unfrozen, added, or replaced by `load_state_dict(assign=True)`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from attrs import define, field

from megaopt_core.errors import OwnershipError
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._between_steps.group_settings import start_groups
from megaopt_core.optimizers._between_steps.look import ModelLook, WrapperWatch
from megaopt_core.optimizers._building.builder import ChildBuilder, infos_of
from megaopt_core.optimizers._building.late_pieces import add_to, replace_in
from megaopt_core.optimizers._gradients.norm_deduplication import counting_rule
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._names import NamedParam, named_params, shown
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._groups import ChildSpec
from megaopt_core.routing._route import route_added
from megaopt_core.routing._routing import Routing
from megaopt_core.sharding._layout import LayoutOptions, World

__all__ = ["LateParams"]

type _Named = dict[str, NamedParam]

_ADDED = "unfrozen or added"
_REPLACED = "replaced, as load_state_dict(assign=True) does"


@define(eq=False)
class LateParams:
    """Brings parameters that begin to train after the build to their optimizer, where the strategy can.

    Before that it looks at who reduces the gradients: those that a new wrapper scatters are not those that are stepped.

    Args:
        optimizer: the optimizer whose step looks.
        owners: the optimizers of the routing's children, in their order.
        builder: built them, and builds what else is needed.
        overrides: what the model was routed with.
    """

    optimizer: MegatronOptimizer
    owners: list[MegatronOptimizer]
    builder: ChildBuilder
    overrides: Mapping[ParamKey, ParamGroupOverride] | None
    look: ModelLook = field(init=False)
    wrappers: WrapperWatch = field(init=False)
    joined: int = field(default=0, init=False)
    """How many parameters have been added or replaced since ranks have compared them."""
    frozen: list[torch.nn.Parameter] = field(factory=list, init=False)
    """The stepped parameters that did not train when it looked last."""

    def __attrs_post_init__(self) -> None:
        watched = self.optimizer.watched_model
        self.wrappers = WrapperWatch(watched, self.builder.pgs)
        self.look = ModelLook(watched, self.optimizer.names, self.optimizer.twins)
        for name_of, chunk in watched.named_chunks() if watched.excluded else ():
            for named in named_params(chunk):
                if name_of(named.name) in watched.excluded:
                    self.look.leave((named.param, *named.twins))

    def settle(self) -> None:
        """Look at the model, and bring to an optimizer what has begun to train.

        Raises:
            MegaoptError: something that trains cannot be stepped, or must not be stepped and would be.
        """
        self.wrappers.settle()
        self.look.require_unchanged()
        self.frozen = self.look.frozen()
        names = [self.optimizer.names[param] for param in self.frozen if self._is_in_buffer(param)]
        if names:
            raise OwnershipError(
                f"{shown([*map(repr, names)])} was frozen after the build, and its strategy steps buffers as a whole, "
                "with a zero gradient where there is none: weight decay and momentum would move it. Build the "
                "optimizer anew",
                names=names,
            )
        strangers = self.look.strangers()
        if strangers:
            self._join(strangers)

    def _is_in_buffer(self, param: torch.nn.Parameter) -> bool:
        """Return whether a parameter is stepped as part of a gradient buffer, which has a gradient in any case."""
        return getattr(param, "main_grad", None) is not None and any(
            piece.spec.buffer is not None and any(param is member for member in piece.model_params)
            for part in self.optimizer.parts
            for piece in part.pieces
        )

    def _join(self, strangers: Sequence[torch.nn.Parameter]) -> None:
        routing, builder = self.optimizer.routing, self.builder
        if routing is None:
            return
        named = self._named(strangers)
        by_name = {name: param for param, name in self.optimizer.names.items()}
        replaced = {name: entry for name, entry in named.items() if name in by_name}
        added = {name: entry for name, entry in named.items() if name not in by_name}
        if added:
            routing = route_added(
                routing, list(added), builder.config, builder.chunks, self.overrides, builder.pgs, builder.fqn
            )
            self.look.leave(entry.param for name, entry in added.items() if name in routing.excluded)
            added = {name: entry for name, entry in added.items() if name not in routing.excluded}
        self._require_possible(routing, replaced, by_name, added)
        if not (replaced or added):
            return
        groups = len(self.optimizer.param_groups)
        for part in self.optimizer.parts:
            part.writes.settle()
        new_of = {by_name[name]: entry.param for name, entry in replaced.items()}
        for owner in self.owners:
            for old in new_of.keys() & owner.names.keys():
                replace_in(owner.parts[0], old, new_of[old])
        self._add(routing, added)
        self._finish(routing, new_of, {**replaced, **added})
        new_groups = self.optimizer.param_groups[groups:]
        start_groups(self.optimizer, new_groups)
        self.joined += len(replaced) + len(added)
        for names, how in ((list(added), _ADDED), (list(replaced), _REPLACED)):
            if names:
                _warn(routing, names, how, len(new_groups))

    def _named(self, strangers: Sequence[torch.nn.Parameter]) -> _Named:
        """Return strangers by the names that the optimizer knows them by; twins of what is stepped are not."""
        wanted = set(map(id, strangers))
        return {
            name_of(entry.name): entry
            for name_of, chunk in self.optimizer.watched_model.named_chunks()
            for entry in named_params(chunk)
            if any(id(param) in wanted for param in (entry.param, *entry.twins))
        }

    def _require_possible(
        self,
        routing: Routing,
        replaced: _Named,
        by_name: Mapping[str, torch.nn.Parameter],
        added: _Named,
    ) -> None:
        for name, entry in (replaced | added).items():
            reason = self._reason(routing, name, entry, by_name.get(name))
            if reason is not None:
                how = _REPLACED if name in replaced else _ADDED
                raise OwnershipError(
                    f"{name!r} trains since the optimizer was built ({how}), and cannot be stepped: {reason}. Build "
                    "the optimizer anew, or leave it to another one with the override "
                    '{"optimizer": "none"}',
                    names=[name],
                )

    def _reason(
        self, routing: Routing, name: str, entry: NamedParam, before: torch.nn.Parameter | None
    ) -> str | None:
        """Return why a parameter cannot be stepped, None when it can."""
        if entry.param.is_meta:
            return "it is on the meta device, which holds no values"
        stepped = [twin for twin in entry.twins if twin in self.optimizer.names]
        if stepped:
            return f"it shares the memory of {self.optimizer.names[stepped[0]]!r}, which is stepped already"
        if before is not None and _kind(before) != _kind(entry.param):
            return f"it is {_words(entry.param)} now and was {_words(before)}"
        norm_group = routing.params[name].grad_norm_group
        if norm_group is not None and norm_group not in self.optimizer.norm_groups:
            return f"its grad_norm_group {norm_group!r} is one that the ranks have not agreed on"
        where = routing.params[name]
        if where.local_shape != where.spec.shape:
            return "it is a part of a tensor that other ranks have parts of"
        pairs = zip(routing.children, self.owners, strict=False)
        shardeds = [owner.parts[0].sharded for child, owner in pairs if child.strategy == where.strategy]
        reason = (
            shardeds[0].refuses_late(entry.param) if shardeds else "nothing else in use is sharded that way"
        )
        return None if reason is None else f"sharding={where.strategy!r}: {reason}"

    def _add(self, routing: Routing, added: _Named) -> None:
        built, infos = len(self.owners), infos_of(routing)
        for owner, child in zip(self.owners, routing.children[:built], strict=True):
            for name, entry in added.items():
                where = routing.params[name]
                if where.spec.group in child.groups:
                    counting = counting_rule(
                        self.builder.pgs,
                        shared=where.shared,
                        tensor_parallel=where.tensor_parallel,
                        is_expert=where.spec.is_expert,
                        norm_group=where.grad_norm_group,
                    )
                    group = child.groups.index(where.spec.group)
                    add_to(owner.parts[0], group, where, entry.param, infos[name], counting)
                    owner.names = {**owner.names, entry.param: name}
        for child in routing.children[built:]:
            made = self._build(routing, child)
            self.owners.append(made)
            self.optimizer.join(made)

    def _build(self, routing: Routing, child: ChildSpec) -> MegatronOptimizer:
        """Return an optimizer that nothing steps yet."""
        specs = [entry.spec for entry in routing.params.values() if entry.spec.group in child.groups]
        layout = get_registry().strategy(child.strategy).layout(specs, World(routing.axes), LayoutOptions())
        return self.builder.build(child, routing, *self.builder.live(routing), layout, {})

    def _finish(
        self, routing: Routing, new_of: Mapping[torch.nn.Parameter, torch.nn.Parameter], joined: _Named
    ) -> None:
        """Let all optimizers know what is stepped now; state stays, as it does when values are copied."""
        added = {entry.param: name for name, entry in joined.items()}
        twins = {entry.param: entry.twins for entry in joined.values() if entry.twins}
        for optimizer in dict.fromkeys((*self.owners, self.optimizer)):
            names = {new_of.get(param, param): name for param, name in optimizer.names.items()}
            if optimizer is self.optimizer:
                names |= added
            kept = {param: others for param, others in optimizer.twins.of.items() if param not in new_of}
            mine = {param: others for param, others in twins.items() if param in names}
            optimizer.know(names, {**kept, **mine}, routing)
        self.look.steps(self.optimizer.names, self.optimizer.twins)


def _warn(routing: Routing, names: Sequence[str], how: str, new_groups: int) -> None:
    steppers = ", ".join(sorted({routing.params[name].spec.optimizer for name in names}))
    groups = (
        f"; for that there are {new_groups} new parameter groups, which a torch scheduler has to be made anew for"
        if new_groups
        else ""
    )
    warnings.warn(
        f"{shown([*map(repr, names)])} trains since the optimizer was built ({how}) and is stepped from now on, by "
        f"{steppers}{groups}",
        UserWarning,
        stacklevel=5,
    )


def _kind(param: torch.Tensor) -> tuple[object, ...]:
    """Return what must be the same of a parameter that takes the place of another."""
    return param.shape, param.dtype, param.device, type(param.data)


def _words(param: torch.Tensor) -> str:
    return f"{str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} on {param.device}"
