"""A GPU that is not there: tensors without memory, on which launches, host reads and bytes of a step are counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaopt_core.optimizers._step import stats

__all__ = ["StepCount", "fake_gpu"]

ROOT = Path(__file__).parents[2]
_OURS = tuple(str(folder) for folder in (ROOT / "megaopt_core", *sorted(ROOT.glob("plugins/*/src"))))

_VIEWS_AND_MEMORY = (
    "_reshape_alias _unsafe_view alias as_strided chunk detach device diagonal empty empty_like empty_strided expand "
    "flatten is_pinned is_same_size lift_fresh narrow new_empty new_empty_strided permute record_stream select set_ "
    "slice split split_with_sizes squeeze t transpose unbind unflatten unfold unsqueeze view view_as_real"
)
_NO_LAUNCH = frozenset(_VIEWS_AND_MEMORY.split())
"""Operations that launch nothing: views, and memory that nobody fills."""


class StepCount(TorchDispatchMode):
    """Counts the launches of operations on fake CUDA tensors, the bytes that they move, and what the host reads.

    One operation is one launch, although torch's kernels of many tensors take several.

    Attributes:
        launches: `(operation, file and line)` to how many times it was launched.
        counts: operations are being counted.
        reads: file and line to how many times the host waited there for this step's numbers.
        late_reads: likewise for numbers that an earlier step has sent to the host.
        moved: bytes that operations read and write, if each reads and writes its tensors once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.reads: Counter[str] = Counter()
        self.late_reads: Counter[str] = Counter()
        self.moved = 0
        self.counts = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside of the block."""
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def read(self, *, is_late: bool = False) -> None:
        """Count that the host reads.

        Args:
            is_late: an earlier step has sent the numbers.
        """
        if self.counts:
            (self.late_reads if is_late else self.reads)[_where()] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operation."""
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.read()
            return {torch.bool: False, torch.float32: 1.0, torch.float64: 1.0}.get(args[0].dtype, 0)
        # Kernels that only write to what they are given: torch knows no shapes for some of them.
        writes = func._schema.is_mutable and not func._schema.returns
        out = None if writes else func(*args, **kwargs)
        if self.counts and name not in _NO_LAUNCH:
            given, made = _on_gpu((args, kwargs)), _on_gpu(out)
            if given or made:
                self.launches[name, _where()] += 1
                self.moved += _bytes(given) + _bytes(_written(func, args, kwargs) or made)
        return out

    def __str__(self) -> str:
        lines = [f"{number:5d} x the host reads at {where}" for where, number in self.reads.items()]
        lines += [
            f"{number:5d} x the host reads late at {where}" for where, number in self.late_reads.items()
        ]
        lines += [f"{number:5d} x {name} at {where}" for (name, where), number in self.launches.most_common()]
        return "\n".join(lines)


def _on_gpu(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and each.is_cuda]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return []
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        each.name
        for each in func._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return _on_gpu([named.get(name) for name in changed])


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _where() -> str:
    """Return the innermost line of megaopt that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a line that is not megaopt's"


class _Nothing:
    """Stands in for streams and events: whatever is called does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def fake_gpu(counted: StepCount) -> Iterator[None]:
    """Make tensors without memory inside of the block, on devices that need not be there.

    The statistics of every step arrive as norms of 1 and votes that have not fired.
    """

    class Copied:
        """Stands in for numbers that travel to the host."""

        def __init__(self, values: torch.Tensor) -> None:
            self.is_read, self.is_counted = False, counted.counts

    def numbers(self: Any) -> list[float]:
        if self._copied is None:
            return []
        if not self._copied.is_read:
            self._copied.is_read = True
            counted.read(is_late=not self._copied.is_counted)
        flags = len(self.heard.flags)
        return [1.0] * (len(self.heard.values) - flags) + [0.0] * flags

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "Event", _Nothing)
        patched.setattr(torch.cuda, "Event", _Nothing)
        patched.setattr(torch.cuda, "Stream", _Nothing)
        patched.setattr(torch.cuda, "current_stream", _Nothing)
        patched.setattr(torch.cuda, "get_device_capability", lambda *args, **kwargs: (9, 0))
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patched.setattr(stats, "ToHost", Copied)
        patched.setattr(stats.StepStats, "_numbers", property(numbers))
        with FakeTensorMode(allow_non_fake_inputs=True), counted:
            yield
