"""The report of an optimizer as data: its parameters, its inner optimizers, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import asdict, field, frozen

from megaopt_core.plugin_api._observers import ReportLine
from megaopt_core.reporting._report_text import WIDTH, full_text, short_text, summary_table

__all__ = ["OptimizerReport", "ParamRow", "PartRow"]


@frozen
class ParamRow:
    """One parameter of the report.

    Args:
        name: canonical name.
        shape: of this rank's tensor.
        role: what it was found to be.
        view: how it is seen as matrices, in words; empty for none.
        optimizer: registered name.
        optimizer_class: class of the inner optimizer that holds it.
        plugin: distribution and version that brought the optimizer.
        strategy: how it is sharded.
        group: index of its group.
        lr: its learning rate now.
        wd: its weight decay now.
        reason: why it gets this optimizer.
        uncertain: the reason is a guess.
        travels: `"split"` where its update goes to an owner to be transformed, `"whole"` where its gradient goes to an
            owner that makes the step; empty where it is stepped where it is.
        bytes: what this rank sends for that in one step.
        note: how its optimizer steps it, in the optimizer's words.
        owner: which of the ranks that share it makes the step, such as `"dp 1"`; empty where nobody tells.
        place: where its state lies and its step is made, where that is not the parameter's device; empty where it is.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    view: str
    optimizer: str
    optimizer_class: str
    plugin: str
    strategy: str
    group: int
    lr: float
    wd: float
    reason: str
    uncertain: bool
    travels: str = ""
    bytes: int = 0
    note: str = ""
    owner: str = ""
    place: str = ""


@frozen
class PartRow:
    """One inner optimizer of the report.

    Args:
        optimizer: registered name.
        optimizer_class: its class.
        plugin: distribution and version that brought it.
        parameters: how many model parameters it steps on this rank.
        elements: how many elements.
        changed: how many of the tensors that this rank steps the last step changed; None when that was not asked for.
        stepped: how many tensors this rank steps.
        method: how changes were detected.
        same_as: `"module:Class"` of the optimizer whose first steps it shares by its entry; empty for none.
        sent: bytes that this rank has sent to other ranks in the last step, counted at the process groups; None where
            nothing travels, or nobody counts.
        collectives: in how many collectives.
        strategy: how it is sharded; empty where it was made by hand.
    """

    optimizer: str
    optimizer_class: str
    plugin: str
    parameters: int
    elements: int
    changed: int | None
    stepped: int
    method: str
    same_as: str = ""
    sent: int | None = None
    collectives: int = 0
    strategy: str = ""


@frozen
class OptimizerReport:
    """What is stepped by whom; `str()` is one screen of tables, :meth:`to_json` all of it for programs.

    Args:
        params: one row a parameter, in model order.
        parts: one row an inner optimizer.
        unused_settings: settings that were given and change nothing here, each with the reason.
        problems: what no longer fits between the optimizer and its model.
        readers: distributions and versions of the plugins that read roles from the model.
        notes: lines of step observers, and whether ranks are compared.
        full: `str()` has a row for every parameter, with all that is known of it.
    """

    params: Sequence[ParamRow]
    parts: Sequence[PartRow]
    unused_settings: Sequence[str] = ()
    problems: Sequence[str] = ()
    readers: Sequence[str] = ()
    notes: Sequence[ReportLine] = ()
    full: bool = field(default=False, eq=False)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(asdict(self, filter=lambda about, _: about.name != "full"), indent=2)

    def summary(self, width: int | None = None) -> str:
        """Return one table with a row for every optimizer.

        Args:
            width: longest line, for which classes and plugins give way; None: no limit.
        """
        return summary_table(self, width)

    def text(self, width: int = WIDTH) -> str:
        """Return the report on one screen; repeated layers share a row.

        Args:
            width: longest line.
        """
        return short_text(self, width)

    def __str__(self) -> str:
        return full_text(self) if self.full else self.text()
