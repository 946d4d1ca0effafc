"""What ranks must have alike when they route: the configuration, and what they hold replicas of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

from attrs import field, frozen

from megaopt_core.config._dtypes import dtype_name
from megaopt_core.config._fields import CORE_FIELD_NAMES
from megaopt_core.config._optimizer_config import OptimizerConfig
from megaopt_core.errors import PluginError
from megaopt_core.parallel._agreement import Comparison, Rows, fingerprint
from megaopt_core.parallel._groups import ProcessGroupCollection, communicates
from megaopt_core.params._names import shown
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._assign import Assignment
from megaopt_core.routing._groups import GroupKey
from megaopt_core.routing._inventory import InventoryItem

__all__ = [
    "ADVICE",
    "Holding",
    "names_of_several",
    "params_alike",
    "plain_words",
    "settings_alike",
    "stages_of_names",
    "wrong_names",
]

ADVICE = (
    "Give the same model, configuration and overrides on all of these ranks. If ranks hold models, stages or shards "
    "of their own, pass pg_collection; ProcessGroupCollection() stands for a model on one rank alone"
)

_NAME_ADVICE = (
    "give build_optimizer and the save fqn=lambda chunk, name: ..., which returns the name that the whole model has: "
    're.sub(r"(layers|experts)\\.(\\d+)", lambda found: f"{found[1]}.{int(found[2]) + FIRST}", name), with the number '
    "FIRST of this rank's first layer or expert"
)

_OF_THE_RANK = ("timers", "config_logger_dir")
"""Settings that a rank may have for itself."""


def settings_alike(config: OptimizerConfig) -> Comparison:
    """Return what all ranks must have alike of a configuration: every setting that changes a step.

    Args:
        config: the run's configuration.
    """
    defaults = OptimizerConfig()
    changed = [
        (name, plain_words(value))
        for name, value in sorted(_settings(config).items())
        if not _is_default(name, value, defaults)
    ]
    return Comparison("the configuration", fingerprint(changed), lambda: _setting_rows(config))


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    core = {name: getattr(config, name) for name in CORE_FIELD_NAMES if name not in _OF_THE_RANK}
    return {**core, **config.plugin_settings}


def _is_default(name: str, value: Any, defaults: OptimizerConfig) -> bool:
    """Return whether a setting says what no setting says; one of a plugin that is not there says something."""
    try:
        return plain_words(getattr(defaults, name)) == plain_words(value)
    except PluginError:
        return False


def _setting_rows(config: OptimizerConfig) -> Rows:
    """Return every setting, those too that nobody has given: another rank may have."""
    defaults, rows = OptimizerConfig(), []
    of_plugins = {name: getattr(config, name) for name in get_registry().setting_owners()}
    for name, value in {**_settings(config), **of_plugins}.items():
        note = " (the default)" if _is_default(name, value, defaults) else ""
        rows.append((name, {"": f"{plain_words(value)}{note}"}))
    return rows


def plain_words(value: Any) -> str:
    """Return a value in words that are the same on every rank: no addresses.

    Args:
        value: of a setting.
    """
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {plain_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(plain_words, value)) + ")"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def params_alike(held: Holding, pgs: ProcessGroupCollection) -> list[Comparison]:
    """Return what the ranks that hold the same trainable parameters must have alike of them, in order.

    Dense parameters are compared over their data-parallel group, those of experts over theirs.

    Args:
        held: the trainable parameters of this rank.
        pgs: the process groups.
    """
    kinds = (
        ("the trainable parameters", pgs.dense_dp, held.dense),
        ("the trainable parameters of experts", pgs.expt_dp, held.experts),
    )
    return [
        Comparison(what, some.digest, some.rows, group) for what, group, some in kinds if communicates(group)
    ]


@frozen(eq=False)
class Holding:
    """The trainable parameters that a rank holds.

    Args:
        dense: those that all data-parallel ranks hold.
        experts: those of experts.
        digest: equal on two ranks that hold the same parameters and send them to the same groups.
    """

    dense: _Params
    experts: _Params
    digest: bytes

    @classmethod
    def of(cls, items: Sequence[InventoryItem], assignments: Mapping[str, Assignment]) -> Holding:
        """Return what a rank holds.

        Args:
            items: the trainable parameters of this rank.
            assignments: name to where it goes, in the same order.
        """
        assigned = list(assignments.values())
        are_experts = [item.is_expert for item in items]
        if not any(are_experts):
            everything = _Params(items, assigned)
            return cls(everything, _Params((), ()), everything.digest)
        dense, experts = (
            _Params(list(compress(items, mask)), list(compress(assigned, mask)))
            for mask in ([not is_expert for is_expert in are_experts], are_experts)
        )
        return cls(dense, experts, fingerprint((dense.digest, experts.digest, are_experts)))


@frozen(eq=False)
class _Params:
    """Parameters and where they go.

    Args:
        items: the parameters, in order.
        assigned: where each goes.
        digest: of all that ranks must have alike of them.
    """

    items: Sequence[InventoryItem]
    assigned: Sequence[Assignment]
    digest: bytes = field(init=False)

    @digest.default
    def _digest(self) -> bytes:
        """Return the digest of columns: of what many parameters share, a few words and a number for each."""
        names = "\0".join(map(attrgetter("name"), self.items))
        traits = _column(list(map(attrgetter("traits"), self.items)), plain_words)
        return fingerprint((names, traits, _column(list(map(attrgetter("key"), self.assigned)), _key_words)))

    def rows(self) -> Rows:
        """Return what there is to say about each parameter."""
        return [_row(item, to.key) for item, to in zip(self.items, self.assigned, strict=True)]


def _column(values: Sequence[Any], say: Callable[[Any], str]) -> tuple[list[str], list[int]]:
    """Return the distinct values in words, and the number of each value among them; no numbers where there is one.

    Many parameters share one object, which is found sooner than it is hashed.
    """
    if values and all(map(is_, values, repeat(values[0]))):
        return [say(values[0])], []
    ids = list(map(id, values))
    words: dict[str, int] = {}
    by_id = dict(zip(ids, values, strict=True))
    numbers = {identity: words.setdefault(say(value), len(words)) for identity, value in by_id.items()}
    return list(words), list(map(numbers.__getitem__, ids)) if len(words) > 1 else []


def _key_words(key: GroupKey) -> str:
    return f"{key.optimizer!r} {_plugin_words(key)} {_override_words(key)} {key.is_expert}"


def _plugin_words(key: GroupKey) -> str:
    """Return who brings an optimizer, and in which version: another one may step otherwise."""
    registry = get_registry()
    return registry.owner("optimizer", key.optimizer).source if registry.has_optimizer(key.optimizer) else ""


def _override_words(key: GroupKey) -> str:
    return plain_words(dict((*(key.override or ()), *key.settings)))


def _row(item: InventoryItem, key: GroupKey) -> tuple[str, dict[str, str]]:
    cuts = [f"{cut.axis} of {cut.size} cuts {cut.dim}" for cut in item.part.placements]
    said = {
        "shape": str(item.part.shape),
        "dtype": dtype_name(item.param.dtype),
        "optimizer": repr(key.optimizer),
        "plugin": _plugin_words(key),
        "override": _override_words(key),
        "matrix view": repr(item.decision.view),
        "parallel": ", ".join(cuts) or ("cut" if item.part.tensor_parallel else "whole"),
        "grad_norm_group": repr(item.grad_norm_group),
        "shared": repr(item.shared),
        "shared_embedding": repr(item.shared_embedding),
    }
    return f"parameter {item.name!r}", said


def stages_of_names(
    names: Iterable[str], experts: Iterable[str], axes: Mapping[str, int], rank: Mapping[str, int]
) -> dict[str, list[int]]:
    """Return where the tensors are that no other stage of a pipeline, or rank of an expert group, has.

    Args:
        names: of this rank's tensors, but for those that stages share.
        experts: those of them that are experts.
        axes: number of ranks along each axis.
        rank: where this rank stands on them.
    """
    found: dict[str, list[int]] = {}
    for axis, mine in (("pp", names), ("ep", experts)):
        if axes.get(axis, 1) > 1:
            found |= {f"{axis}:{name}": [rank.get(axis, 0)] for name in sorted(set(mine))}
    return found


def names_of_several(of_ranks: Iterable[Mapping[str, Iterable[int]]]) -> list[str]:
    """Return the names that several places have.

    Args:
        of_ranks: what :func:`stages_of_names` returned on each.
    """
    seen: dict[str, set[int]] = defaultdict(set)
    for of_rank in of_ranks:
        for name, at in of_rank.items():
            seen[name].update(at)
    return sorted({name.partition(":")[2] for name, at in seen.items() if len(at) > 1})


def wrong_names(names: list[str]) -> str:
    """Return what is wrong with names that mean other tensors elsewhere, and what to do.

    Args:
        names: the names.
    """
    return (
        f"ranks of a pipeline or an expert group have different tensors of one name: {shown(names)}. Each "
        f"rank counts its layers or experts from 0: {_NAME_ADVICE}"
    )
