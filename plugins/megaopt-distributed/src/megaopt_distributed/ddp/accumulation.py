"""The gradients of a wrapped model: added to buffers as autograd hands them over, and reduced bucket by bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field

from megaopt_core.errors import GradientError
from megaopt_distributed.buffers.bucket import Bucket, GradSync
from megaopt_distributed.buffers.buffer import ParamAndGradBuffer
from megaopt_distributed.ddp.finite import FiniteCheck
from megaopt_distributed.ddp.readiness import ReadyBuckets

__all__ = ["GradAccumulation"]


@define(eq=False)
class GradAccumulation:
    """Adds each fresh gradient to its buffer and has a bucket reduced when its last gradient is there.

    Parameters hold it by a weak reference only. When it is gone, they are ordinary parameters again, without
    `main_grad`.

    Args:
        params: canonical name to trainable parameter, in the model's order.
        name_of: the name under which the gradient of a parameter object is kept; twins share one.
        buffers: where gradients are kept.
        groups: the buckets of each process group.
        overlap: reduce during the backward pass.
        check: looks at gradients before they are reduced.
    """

    params: Mapping[str, torch.nn.Parameter]
    name_of: Mapping[torch.nn.Parameter, str]
    buffers: Sequence[ParamAndGradBuffer]
    groups: Sequence[Sequence[Bucket]]
    overlap: bool
    check: FiniteCheck | None = None
    synchronises: bool = field(default=True, init=False)
    _queues: Sequence[ReadyBuckets] = field(init=False)
    _bucket_of: Mapping[str, Bucket] = field(init=False)
    _queue_of: Mapping[str, ReadyBuckets] = field(init=False)
    _buffer_of: Mapping[str, int] = field(init=False)
    _reduced_at: tuple[int, ...] | None = field(default=None, init=False)
    _unusable: GradientError | None = field(default=None, init=False)
    _zeroed: set[str] = field(factory=set, init=False)
    _writes: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        position = {name: index for index, name in enumerate(self.params)}
        # A bucket is complete when backward has reached its first parameter in the model's order.
        self._queues = [
            ReadyBuckets(
                sorted(
                    buckets, key=lambda bucket: -min((position[name] for name in bucket.params), default=0)
                ),
                partial(_start, self.check),
            )
            for buckets in self.groups
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.params}
        self._queue_of = {
            name: queue for queue in self._queues for bucket in queue.buckets for name in bucket.params
        }
        self._buffer_of = {name: index for index, buffer in enumerate(self.buffers) for name in buffer.params}
        self._writes = list(self._versions())
        me = weakref.ref(self)
        handles = [
            param.register_post_accumulate_grad_hook(_hook(me, name))
            for param, name in self.name_of.items()
            if param.requires_grad
        ]
        views = [(param, param.main_grad) for param in self.params.values()]  # type: ignore[attr-defined]
        weakref.finalize(self, _release, handles, views).atexit = False

    @property
    def _buckets(self) -> Iterable[Bucket]:
        return (bucket for buffer in self.buffers for bucket in buffer.buckets)

    @property
    def is_reduced(self) -> bool:
        """True from the end of a reduction until gradients are zeroed."""
        return self._reduced_at is not None

    def accumulate(self, name: str, param: torch.nn.Parameter) -> None:
        """Take over a parameter's fresh gradient; start its bucket's reduction when it was the last.

        Args:
            name: under which it is kept.
            param: the parameter, or a twin of it.

        Raises:
            GradientError: gradients were reduced and not zeroed since, or the bucket is being reduced already.
        """
        if param.grad is None:
            return
        if self._reduced_at is not None:
            self._begin_again(name, self._reduced_at)
        if self._bucket_of[name].grad_state is not GradSync.LOCAL:
            raise GradientError(
                f"a gradient of {name!r} arrived after its bucket was reduced: this backward pass handed it over more "
                "often than any before. Use no_sync() for all but the last of several backward passes, or "
                "overlap_grad_reduce=False",
                names=[name],
            )
        main_grad: torch.Tensor = self.params[name].main_grad  # type: ignore[attr-defined]
        is_zero = self._still_zero(name)
        if param.grad.layout is not torch.strided:
            main_grad.add_(param.grad.to(main_grad.dtype))
        elif is_zero:
            main_grad.copy_(param.grad)
        else:
            main_grad.add_(param.grad)
        self._writes[self._buffer_of[name]] += 1
        param.grad = None
        if self.synchronises and self.overlap:
            self._queue_of[name].accumulated(name)

    def _still_zero(self, name: str) -> bool:
        """Return whether a gradient is zero for sure: the first since zeroing, and nobody else has written since."""
        if name not in self._zeroed:
            return False
        self._zeroed.discard(name)
        index = self._buffer_of[name]
        return self._versions()[index] == self._writes[index]

    def _begin_again(self, name: str, reduced_at: tuple[int, ...]) -> None:
        """Begin a new accumulation when somebody has zeroed `main_grad` by hand; raise when reduced gradients stand."""
        if self._stand(reduced_at):
            raise GradientError(
                f"a gradient of {name!r} arrived after gradients were reduced: call optimizer.zero_grad() or "
                "zero_grad_buffer() after every step",
                names=[name],
            )
        self._begin()

    def _stand(self, reduced_at: tuple[int, ...]) -> bool:
        """Return whether reduced gradients have not been zeroed since."""
        return reduced_at == self._versions() or any(bool(buffer.grad_data.any()) for buffer in self.buffers)

    def _begin(self) -> None:
        for bucket in self._buckets:
            bucket.reset_grads()
        for queue in self._queues:
            queue.begin()
        self._reduced_at = self._unusable = None

    def _versions(self) -> tuple[int, ...]:
        """Return how often each buffer was written to, through `main_grad` too."""
        return tuple(buffer.grad_data._version for buffer in self.buffers)

    def start(self) -> None:
        """Begin to reduce every bucket that is not being reduced yet."""
        if not self.is_reduced:
            for queue in self._queues:
                queue.start_rest()

    def finish(self) -> None:
        """Return when all gradients are reduced.

        Raises:
            GradientError: the check has found something on some rank; again with every call until gradients are zeroed.
            CommunicationError: another rank has stopped.
        """
        if self._reduced_at is not None:
            if self._unusable is not None and self._stand(self._reduced_at):
                raise GradientError(str(self._unusable), names=self._unusable.names)
            return
        self.start()
        for bucket in self._buckets:
            bucket.finish_grad_sync()
        self._reduced_at = self._versions()
        if self.check is not None:
            try:
                self.check.tell()
            except GradientError as error:
                self._unusable = error.with_traceback(None)
                raise GradientError(str(error), names=error.names) from None

    def zero(self) -> None:
        """Fill all gradients with zeros; the next gradients begin a new accumulation."""
        self._begin()
        for buffer in self.buffers:
            buffer.grad_data.zero_()
        self._zeroed, self._writes = set(self.params), list(self._versions())

    def scale(self, factor: float) -> None:
        """Multiply all gradients, of which none may be under way.

        Args:
            factor: what they are multiplied by.
        """
        for buffer in self.buffers:
            buffer.grad_data.mul_(factor)
        if self._unusable is not None:  # what was refused is refused on all ranks, whatever each has of it
            self._reduced_at = self._versions()


def _start(check: FiniteCheck | None, bucket: Bucket) -> None:
    if check is not None:
        check.look(bucket)
    bucket.start_grad_sync()


def _hook(owner: weakref.ref[GradAccumulation], name: str) -> Callable[[torch.nn.Parameter], None]:
    def hand_over(param: torch.nn.Parameter) -> None:
        accumulation = owner()
        if accumulation is not None:
            accumulation.accumulate(name, param)

    return hand_over


def _release(handles: Sequence[Any], views: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Make parameters ordinary ones again, unless another wrapper has them by now."""
    for handle in handles:
        handle.remove()
    for param, main_grad in views:
        if getattr(param, "main_grad", None) is main_grad:
            del param.main_grad  # type: ignore[attr-defined]
            vars(param).pop("reduced_by", None)
