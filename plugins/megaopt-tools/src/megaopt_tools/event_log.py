"""The TensorBoard log of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megaopt_tools.training import PARTS, RunResult, StepRecord

if TYPE_CHECKING:
    from megaopt_core.reporting import OptimizerReport

__all__ = ["EventLog"]


class EventLog:
    """Writes loss, learning rate, gradient norm and times of every step, so that a run can be watched.

    Used in a `with` statement. Logs of earlier runs in the same folder are removed: TensorBoard would draw them as one.

    Args:
        folder: where the log goes; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def built(self, report: OptimizerReport) -> None:
        """Write the report as text."""
        self._text("optimizers", f"```\n{report.summary()}\n```")

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """Write the steps of the earlier process, whose log was removed."""
        for record in records:
            self.stepped(record)

    def stepped(self, record: StepRecord) -> None:
        """Write the step's numbers."""
        self._scalar("train/loss", record.loss, record.step)
        self._scalar("train/lr", record.lr, record.step)
        if record.grad_norm is not None:
            self._scalar("train/grad_norm", record.grad_norm, record.step)
        for part in PARTS:
            self._scalar(f"milliseconds/{part}", 1000 * getattr(record, part), record.step)

    def finished(self, result: RunResult) -> None:
        """Write what came out on the held-out text."""
        if result.val_bits_per_byte is not None:
            self._scalar("val/bits_per_byte", result.val_bits_per_byte, result.records[-1].step)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def _text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text)
