"""Parameters that begin to train after the build: unfrozen, added, or replaced by `load_state_dict(assign=True)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from megaopt_core.errors import OwnershipError, warn_user
from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._between_steps.group_settings import start_groups
from megaopt_core.optimizers._between_steps.look import ModelLook
from megaopt_core.optimizers._building.builder import ChildBuilder, infos_of
from megaopt_core.optimizers._building.late_pieces import add_to, init_added, replace_in
from megaopt_core.optimizers._gradients.norm_deduplication import counting_rule
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._names import NamedParam, named_params, shown
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._parts import is_dtensor
from megaopt_core.plugin_api._observers import Change
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
    joined: int = field(default=0, init=False)
    """How many parameters have been added or replaced since ranks have compared them."""
    frozen: list[torch.nn.Parameter] = field(factory=list, init=False)
    """The stepped parameters that did not train when it looked last."""
    aside: dict[torch.nn.Parameter, str] = field(factory=dict, init=False)
    """Those that have not trained yet here, by name: a load brought their state, which is kept for when they do."""

    def __attrs_post_init__(self) -> None:
        watched = self.optimizer.watched_model
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
        self.look.require_unchanged()
        self.frozen = self.look.frozen()
        self._require_reduced()
        names = [self.optimizer.names[param] for param in self.frozen if self._is_in_buffer(param)]
        if names:
            raise OwnershipError(
                f"{shown([*map(repr, names)])} was frozen after the build. Its strategy steps whole buffers, "
                "with a zero gradient where there is none, so weight decay and momentum would move the "
                "frozen values. Build the optimizer anew",
                names=names,
            )
        strangers = self.look.strangers()
        if strangers:
            self._join(strangers)

    def add(
        self,
        params: Sequence[torch.nn.Parameter],
        *,
        apart: bool = True,
        kept: Mapping[torch.nn.Parameter, str] | None = None,
    ) -> None:
        """Step parameters of the model from now on, frozen or not.

        Args:
            params: nothing steps them.
            apart: in groups of their own.
            kept: those of them whose state comes with a load, by name.

        Raises:
            MegaoptError: they cannot be stepped; nothing has changed.
        """
        self.aside.update(kept or {})
        frozen = [param for param in params if not param.requires_grad]
        for param in frozen:  # routed as if they trained
            param.requires_grad = True
        try:
            self._join(params, apart=apart)
        finally:  # it may have failed, or an override may send some of them to no optimizer
            self.aside = {param: name for param, name in self.aside.items() if param in self.optimizer.names}
            for param in frozen:
                param.requires_grad = False

    def keeps(self, group: Mapping[str, Any]) -> bool:
        """Return whether a group came with a load, and none of it has trained since.

        Args:
            group: a public group.
        """
        return bool(group["params"]) and all(param in self.aside for param in group["params"])

    def keepable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters, frozen at the build, that can be taken in: where all are stepped whole."""
        routing = self.optimizer.routing
        if routing is None or not routing.frozen or {c.strategy for c in routing.children} != {"replicated"}:
            return {}
        if any(routing.axes.get(axis, 1) > 1 for axis in ("tp", "expert_tp", "ep")):
            return {}
        frozen = set(routing.frozen)
        return {
            name: entry.param
            for name_of, chunk in self.optimizer.watched_model.named_chunks()
            for entry in named_params(chunk)
            if (name := name_of(entry.name)) in frozen and not is_dtensor(entry.param)
        }

    def keep(self, names: Sequence[str], *, apart: bool) -> None:
        """Take in parameters that are frozen: a load brings their state, which a step uses when they train.

        Args:
            names: of the parameters.
            apart: in groups of their own.

        Raises:
            MegaoptError: they could not be stepped if they trained; nothing has changed.
        """
        keepable = self.keepable()
        kept = {keepable[name]: name for name in names}
        self.add([*kept], apart=apart, kept=kept)

    def _require_reduced(self) -> None:
        """Raise where a parameter begins to train whose gradients nobody reduces."""
        for param in [param for param in self.aside if param.requires_grad]:
            name = self.aside[param]
            reason = self._refused(self.optimizer.routing, name, param)  # type: ignore[arg-type] # what joined is routed
            if reason is not None:
                raise _unsteppable(name, _ADDED, reason)
            del self.aside[param]

    def _is_in_buffer(self, param: torch.nn.Parameter) -> bool:
        """Return whether a parameter is stepped as part of a gradient buffer, which has a gradient in any case."""
        return getattr(param, "main_grad", None) is not None and any(
            piece.spec.buffer is not None and any(param is member for member in piece.model_params)
            for part in self.optimizer.parts
            for piece in part.pieces
        )

    def _join(self, strangers: Sequence[torch.nn.Parameter], *, apart: bool | None = None) -> None:
        """Step parameters from now on; with a warning, unless somebody has said whether in groups of their own."""
        routing, builder = self.optimizer.routing, self.builder
        if routing is None:
            return
        named = self._named(strangers)
        by_name = {name: param for param, name in self.optimizer.names.items()}
        replaced = {name: entry for name, entry in named.items() if name in by_name}
        added = {name: entry for name, entry in named.items() if name not in by_name}
        if added:
            known = builder.config, builder.chunks, self.overrides, builder.pgs, builder.fqn
            routing = route_added(routing, list(added), *known, apart=bool(apart))
            self.look.leave(entry.param for name, entry in added.items() if name in routing.excluded)
            added = {name: entry for name, entry in added.items() if name not in routing.excluded}
        self._require_possible(routing, replaced, by_name, added)
        if not (replaced or added):
            return
        groups = len(self.optimizer.param_groups)
        new_of = {by_name[name]: entry.param for name, entry in replaced.items()}
        with self.optimizer.changing(Change.JOINED):
            for owner in self.owners:
                for old in new_of.keys() & owner.names.keys():
                    replace_in(owner.parts[0], old, new_of[old])
            self._add(routing, added)
            self._finish(routing, new_of, {**replaced, **added})
        new_groups = self.optimizer.param_groups[groups:]
        start_groups(self.optimizer, new_groups)
        self.joined += len(replaced) + len(added)
        for names, how in ((list(added), _ADDED), (list(replaced), _REPLACED)):
            if names and apart is None:
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
                raise _unsteppable(name, _REPLACED if name in replaced else _ADDED, reason)

    def _reason(
        self, routing: Routing, name: str, entry: NamedParam, before: torch.nn.Parameter | None
    ) -> str | None:
        """Return why a parameter cannot be stepped, None when it can."""
        if entry.param.is_meta:
            return "it is on the meta device and holds no values; call to_empty() and initialise it first"
        stepped = [twin for twin in entry.twins if twin in self.optimizer.names]
        if stepped:
            return f"it shares the memory of {self.optimizer.names[stepped[0]]!r}, which is stepped already"
        if before is not None and _kind(before) != _kind(entry.param):
            return f"it is {_words(entry.param)} now and was {_words(before)}"
        norm_group = routing.params[name].grad_norm_group
        if norm_group is not None and norm_group not in self.optimizer.norm_groups:
            return f"the ranks have not agreed on its grad_norm_group {norm_group!r}"
        where = routing.params[name]
        if where.local_shape != where.spec.shape:
            return "it is a part of a tensor, and other ranks have the other parts"
        return None if entry.param in self.aside else self._refused(routing, name, entry.param)

    def _refused(self, routing: Routing, name: str, param: torch.nn.Parameter) -> str | None:
        """Return why a strategy cannot step a parameter that trains, None when it can."""
        where = routing.params[name]
        pairs = zip(routing.children, self.owners, strict=False)
        shardeds = [owner.parts[0].sharded for child, owner in pairs if child.strategy == where.strategy]
        reason = shardeds[0].refuses_late(param) if shardeds else "nothing else in use is sharded that way"
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
            if any(entry.param in owner.names for entry in added.values()):
                init_state = self.builder.registry.optimizer(child.optimizer).init_state_fn
                init_added(owner.parts[0], init_state, self.builder.config)
        for child in routing.children[built:]:
            made = self._build(routing, child)
            self.owners.append(made)
            self.optimizer.join(made)

    def _build(self, routing: Routing, child: ChildSpec) -> MegatronOptimizer:
        """Return an optimizer that nothing steps yet."""
        specs = [entry.spec for entry in routing.params.values() if entry.spec.group in child.groups]
        layout = self.builder.registry.strategy(child.strategy).layout(
            specs, World(routing.axes), LayoutOptions()
        )
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


def _unsteppable(name: str, how: str, reason: str) -> OwnershipError:
    return OwnershipError(
        f"{name!r} trains since the optimizer was built ({how}), and cannot be stepped: {reason}. Build the optimizer "
        'with the parameter trainable and its learning rate 0 ({ParamKey(name=...): {"max_lr": 0.0}}), or leave it to '
        'another one with the override {"optimizer": "none"}',
        names=[name],
    )


def _warn(routing: Routing, names: Sequence[str], how: str, new_groups: int) -> None:
    steppers = ", ".join(sorted({routing.params[name].spec.optimizer for name in names}))
    groups = (
        f"; torch schedulers must be made anew, because there are {new_groups} new parameter groups"
        if new_groups
        else ""
    )
    warn_user(
        f"{shown([*map(repr, names)])} trains since the optimizer was built ({how}); {steppers} steps it "
        f"from now on{groups}",
        UserWarning,
    )


def _kind(param: torch.Tensor) -> tuple[object, ...]:
    """Return what must be the same of a parameter that takes the place of another."""
    return param.shape, param.dtype, param.device, type(param.data)


def _words(param: torch.Tensor) -> str:
    return f"{str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} on {param.device}"
