"""What a load from a checkpoint will do, to a model, an optimizer and a scheduler; and what it will have done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaopt_checkpoint.load_report import LoadReport
from megaopt_checkpoint.model_restore import ModelRestore
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.renaming import NameTable, Rename
from megaopt_checkpoint.restore.matching import LoadedBeside
from megaopt_checkpoint.restore.plan import LoadPlan, plan_load
from megaopt_checkpoint.restore.source import Source, read_values
from megaopt_checkpoint.scheduler_restore import SchedulerRestore
from megaopt_core.state import named_errors

if TYPE_CHECKING:
    from megaopt_checkpoint.model_tensors import ModelTensors
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["plan_checkpoint"]


def plan_checkpoint(
    source: Source,
    model: ModelTensors | None,
    optimizer: MegatronOptimizer | None,
    scheduler: Any = None,
    *,
    strict: bool,
    rename: Rename | None,
    ranks: Ranks,
) -> tuple[LoadPlan, LoadReport]:
    """Find out what a load will do: a collective; nothing is changed.

    Args:
        source: what is loaded.
        model: the model's tensors, or the parts of them that are here; None: it is not loaded.
        optimizer: the optimizer, or None.
        scheduler: the scheduler, or None.
        strict: names must be the same on both sides.
        rename: names in the checkpoint to names here.
        ranks: who loads.

    Returns:
        What will be written, and what the caller is told of it.

    Raises:
        CheckpointError: it does not fit.
    """
    names = ranks.agree(lambda: _names(source, rename))
    restore = None if model is None else ModelRestore.match(source, model, optimizer, names, ranks)
    beside = LoadedBeside(find=names.find) if restore is None else restore.beside()
    plan = plan_load(source, optimizer, strict=strict, ranks=ranks, beside=beside)
    report = _report(plan, names, frozenset() if restore is None else restore.here, ranks)

    def fill() -> None:
        with named_errors(source.name, "it cannot be planned"):
            if restore is not None:
                report.converted.update(restore.plan())
                plan.others.append(restore)
            if scheduler is not None:
                plan.others.append(SchedulerRestore.plan(source, scheduler, strict=strict))
            report.extra = read_values(source, source.manifest.extra)

    ranks.agree(fill)
    return plan, report


def _names(source: Source, rename: Rename | None) -> NameTable:
    stored = source.manifest.model
    names = (*stored.get("tensors", ()), *source.manifest.parameters, *stored.get("objects", ()))
    return NameTable.of(names, stored.get("aliases", {}), rename)


def _report(plan: LoadPlan, names: NameTable, of_model: frozenset[str], ranks: Ranks) -> LoadReport:
    """Return what every rank found together: a collective."""
    found, manifest = plan.found, plan.source.manifest
    reset = {name: why for of_rank in ranks.gather(found.reset) for name, why in of_rank.items()}
    here = of_model | found.here
    return LoadReport(
        loaded=tuple(sorted(set().union(*ranks.gather(set(found.same))))),
        missing=found.missing,
        unexpected=found.unexpected,
        reset=dict(sorted(reset.items())),
        renamed={name: old for name, old in names.renamed().items() if name in here},
        settings=dict(plan.kept),
        world_size=manifest.world_size,
        configuration=manifest.configuration,
    )
