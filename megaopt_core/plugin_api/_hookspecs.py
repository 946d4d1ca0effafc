"""Every hook that a plugin may implement, in one place.

A plugin is a module (or object) that an entry point of group `megaopt` names; it declares `megaopt_api = "1"` and
marks its implementations with :data:`hookimpl`. All hooks are optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.execution._step_runner import StepRunner
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.params._keys import ParamKey
    from megaopt_core.params._overrides import ParamGroupOverride
    from megaopt_core.params._roles import Role, RoleDecision
    from megaopt_core.params._views import MatrixView
    from megaopt_core.plugin_api._after_step import AfterStep
    from megaopt_core.plugin_api._commands import Commands
    from megaopt_core.plugin_api._entries import InitState, OptimizerEntry
    from megaopt_core.plugin_api._observers import StepObserver
    from megaopt_core.plugin_api._schedule_style import ScheduleStyle
    from megaopt_core.plugin_api._shared_state import SharedState
    from megaopt_core.plugin_api._stored_routing import StoredRouting
    from megaopt_core.precision._policy import PrecisionPolicy
    from megaopt_core.precision._state_codes import Decoder
    from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = [
    "hookimpl",
    "hookspec",
    "megaopt_advice",
    "megaopt_after_step",
    "megaopt_annotate_params",
    "megaopt_commands",
    "megaopt_learn_state",
    "megaopt_optimizer_entries",
    "megaopt_param_overrides",
    "megaopt_precision_policies",
    "megaopt_process_groups",
    "megaopt_resolve_optimizer",
    "megaopt_schedules",
    "megaopt_sharding_strategies",
    "megaopt_shared_state",
    "megaopt_state_codes",
    "megaopt_step_observers",
    "megaopt_step_runner",
    "megaopt_stored_routing",
]

hookspec = pluggy.HookspecMarker("megaopt")
hookimpl = pluggy.HookimplMarker("megaopt")
"""Marks a function of a plugin as the implementation of the hook of its name."""


@hookspec
def megaopt_optimizer_entries() -> Mapping[str, OptimizerEntry]:  # type: ignore[empty-body]
    """Offer optimizers.

    Returns:
        `{name: OptimizerEntry}`; the name is what users write in `optimizer="..."`.
    """


@hookspec
def megaopt_resolve_optimizer(name: str) -> OptimizerEntry | None:
    """Offer an optimizer whose name no plugin lists, such as `torch:NAdam`.

    Asked only for names that no plugin offers, once for each. An error of :mod:`megaopt_core.errors` reaches the user
    as it is: the plugin knows the name, and says why there is no such optimizer.

    Args:
        name: what a user wrote in `optimizer="..."`.

    Returns:
        Its entry, always the same one for the same name; None: the plugin does not know the name.
    """


@hookspec
def megaopt_learn_state(optimizer: torch.optim.Optimizer) -> InitState | None:
    """Learn which state an optimizer will make, where its entry does not tell it.

    Asked for an inner optimizer whose entry has neither `init_state_fn` nor `state`, and for one that is wrapped by
    hand without an `init_state_fn`. The first plugin that answers is taken.

    Args:
        optimizer: has not stepped yet.

    Returns:
        `(optimizer, config)`; gives parameters state of the keys, shapes and dtypes that their first step will make.
        Its values are of no use: the first step makes the state. None: the plugin does not learn it.
    """


@hookspec
def megaopt_advice(name: str, known: Sequence[str], optimizer: str | None, kind: str) -> str | None:
    """Say what to write in place of a name that there is not, for an error that is about to be raised.

    Args:
        name: what a user gave.
        known: the names that there are.
        optimizer: the optimizer that it was meant for; None where nobody knows.
        kind: `"setting"` of a configuration, `"override"` for a key of one, `"argument"` of a function.

    Returns:
        The end of a sentence, such as `"; it is called lr here"`; None: the plugin knows nothing of the name.
    """


@hookspec
def megaopt_annotate_params(  # type: ignore[empty-body]
    model_chunk: torch.nn.Module, example: Any, no_forward: str
) -> Mapping[str, Role | MatrixView | RoleDecision]:
    """Say what parameters of a model are that the plugin knows how to see.

    A `Role` or a `MatrixView` is what the plugin knows about models of this kind. A `RoleDecision` is what it has read
    from this one, with the reason and whether it is certain, for any of its parameters (megaopt-roles answers so).
    Attributes on a parameter win over the first, the first over the second; of two readers the certain one wins.

    Args:
        model_chunk: one model chunk, unwrapped, possibly on the meta device.
        example: a batch of the user's for one forward, which a reader may run on the meta device; None: there is none.
        no_forward: why no forward may be run, though there is a batch; empty: one may.

    Returns:
        `{qualified name: Role, MatrixView or RoleDecision}`; a `MatrixView` means role matrix with that view.
    """


@hookspec
def megaopt_param_overrides(  # type: ignore[empty-body]
    config: OptimizerConfig, model_chunks: Sequence[torch.nn.Module]
) -> Mapping[ParamKey, ParamGroupOverride]:
    """Add overrides to the defaults.

    Args:
        config: the run's configuration.
        model_chunks: the model chunks of this rank.

    Returns:
        `{ParamKey: ParamGroupOverride}`.
    """


@hookspec
def megaopt_process_groups(
    model_chunks: Sequence[torch.nn.Module],
) -> ProcessGroupCollection | DeviceMesh | Mapping[str, ProcessGroup] | None:
    """Give the process groups of a model whose trainer keeps them.

    Asked once a build, where the caller gives no `pg_collection` and no wrapper of ours has groups. Two plugins that
    give different groups are an error.

    Args:
        model_chunks: the model chunks of this rank, wrapped or bare.

    Returns:
        A collection, a DeviceMesh or a mapping of its names; None: the model is no model of this trainer's.
    """


@hookspec
def megaopt_sharding_strategies() -> Mapping[str, ShardingStrategy]:  # type: ignore[empty-body]
    """Offer sharding strategies.

    Returns:
        `{name: ShardingStrategy}`.
    """


@hookspec
def megaopt_schedules() -> Mapping[str, ScheduleStyle]:  # type: ignore[empty-body]
    """Offer schedules for the learning rate and for weight decay.

    Returns:
        `{name: ScheduleStyle}`; a style serves the learning rate, weight decay or both.
    """


@hookspec
def megaopt_precision_policies() -> Mapping[str, type[PrecisionPolicy]]:  # type: ignore[empty-body]
    """Offer precision policies: what is stepped, and how parameters and states are kept between steps.

    Returns:
        `{name: class}`; the name is what users write in `precision="..."`. `PrecisionPolicy.of` makes one for each
        inner optimizer.
    """


@hookspec
def megaopt_state_codes() -> Mapping[str, Decoder]:  # type: ignore[empty-body]
    """Offer decoders of codes in which precision policies store optimizer states.

    A checkpoint names the code of every state that was stored in one; a run with another policy reads it by this.

    Returns:
        `{name: decoder}`; a decoder takes a `StoredSlice` and returns its values in fp32, flat.
    """


@hookspec
def megaopt_step_observers(optimizer: torch.optim.Optimizer) -> Sequence[StepObserver]:  # type: ignore[empty-body]
    """Offer what watches the steps of an optimizer and can stop them.

    Asked once for the optimizer whose `step` is called, when it is complete; a chain drops the observers of its
    children. Every rank gives observers with the same votes, in the same order.

    Args:
        optimizer: a `MegatronOptimizer`, built or wrapped by hand.

    Returns:
        New observers; empty: the plugin has nothing to watch here.
    """


@hookspec
def megaopt_after_step(optimizer: torch.optim.Optimizer) -> Sequence[AfterStep]:  # type: ignore[empty-body]
    """Offer transforms that write to parameters after each step: clipping of weights, projections, normalization.

    Asked once for the optimizer whose `step` is called, when it is complete. Every rank gives the same transforms.

    Args:
        optimizer: a `MegatronOptimizer`, built or wrapped by hand.

    Returns:
        The transforms, in the order in which they write; empty: the plugin has nothing to write here.
    """


@hookspec
def megaopt_step_runner(config: OptimizerConfig, entry: OptimizerEntry, name: str) -> StepRunner | None:
    """Offer what runs the steps of an inner optimizer otherwise than in place and at once.

    Asked for each inner optimizer when it is built, where `optimizer_cpu_offload` or `optimizer_cuda_graph` is set.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry.
        name: its registered name.

    Returns:
        A new runner; None: the plugin runs no such optimizer.
    """


@hookspec
def megaopt_shared_state(optimizer: torch.optim.Optimizer) -> SharedState | None:
    """Say how the state dicts of an optimizer show states that its ranks share, for `state_dict()` and its load.

    It is asked where a strategy shares parameters out over ranks; the first plugin that answers is taken.

    Args:
        optimizer: a built optimizer.

    Returns:
        What shows and takes them; None: this plugin does not.
    """


@hookspec
def megaopt_stored_routing(path: str) -> StoredRouting | None:
    """Read which optimizer stepped each parameter when a checkpoint was saved, for `routing="path"`.

    Args:
        path: what the user wrote.

    Returns:
        The routing; None where there is nothing at the path that this plugin reads.
    """


@hookspec
def megaopt_commands(commands: Commands) -> None:
    """Add commands to `megaopt`.

    A command sets `parser.set_defaults(run=function)`; the function takes the parsed arguments and returns an exit
    status. Import what is heavy inside the function.

    Args:
        commands: takes commands as what `ArgumentParser.add_subparsers` returns does.
    """
