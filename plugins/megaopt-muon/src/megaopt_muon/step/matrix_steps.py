"""What each step of Muon does: element by element, then with whole matrices, then element by element again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, override

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch._compile import _disable_dynamo

from megaopt_muon.pieces.batches import is_swept
from megaopt_muon.pieces.execution import merged, orthogonalize_pieces
from megaopt_muon.pieces.half_batches import HalfBatches
from megaopt_muon.step.changes import Change, applied_together
from megaopt_muon.step.local_step import LocalStep, gradient_of, runs_of

if TYPE_CHECKING:
    from megaopt_muon.choice.books import GroupBooks
    from megaopt_muon.choice.methods import MethodBook
    from megaopt_muon.newton_schulz.iteration import NewtonSchulz
    from megaopt_muon.newton_schulz.scaled import Scaled
    from megaopt_muon.pieces.planner import Planner
    from megaopt_muon.pieces.plans import MatrixPlan
    from megaopt_muon.step.elementwise import Decay

__all__ = ["MatrixSteps"]


class MatrixSteps(OrthogonalizedOptimizer):
    """The steps of an optimizer of matrices, whose subclass says by its constructor what they are made of."""

    _heads_alone: ClassVar[bool] = True
    """Whether what is done with a head needs nothing of another one."""

    newton_schulz: NewtonSchulz
    planner: Planner
    books: GroupBooks
    local_step: LocalStep
    _active_book: MethodBook | None
    _squares: dict[int, float]
    """Squared norms of the updates that were swept, by position."""

    @_disable_dynamo  # compiled, a step falls back to what it is
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient and elements.

        Args:
            closure: evaluates the loss again; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            GradientError: a gradient is sparse or complex.
            ViewError: a parameter is no matrix, or tensor-parallel ranks hold unequal parts of one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [param for param in group["params"] if param.grad is not None]
            self.planner.require_equal_parts(given, heads_alone=self._heads_alone)
            self._init_group(group)
            params = [param for param in given if param.numel()]
            by_shape = [param for param in params if self._goes_by_shape(param)]
            self._step_by_shape(group, by_shape)
            taken = set(map(id, by_shape))
            for run in runs_of([param for param in params if id(param) not in taken]):
                self._step_params(group, run)
        return loss

    @override
    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the orthogonalized and scaled update of one parameter.

        Args:
            p: the parameter; only its attributes and its shape matter.
            grad: the momentum, of the parameter's shape.
            **kwargs: settings of its group; not read.

        Returns:
            A new tensor of the parameter's shape, float32 (float64 for float64 momentum).
        """
        plan = self.planner.plan(p)
        return merged(self.newton_schulz, plan, grad, self._active_book, scaled=True)

    def _goes_by_shape(self, param: torch.Tensor) -> bool:
        """Whether an accelerator iterates a parameter's matrices with all others of their sides."""
        plan = self.planner.plan(param)
        is_here = not plan.gather_first and (plan.cut is None or plan.cut.mode == "whole")
        return is_here and self.newton_schulz.is_half(param.device) and not self._is_customized()

    def _step_by_shape(self, group: dict[str, Any], params: Sequence[torch.Tensor]) -> None:
        """Step parameters whose updates are made a run at a time, and orthogonalized by shape.

        Updates are wide: only those of one run have memory at a time.
        """
        if not params:
            return
        params = sorted(params, key=lambda param: sorted(param.shape))  # then batches are complete early
        plans = [self.planner.plan(param) for param in params]
        positions = {id(param): index for index, param in enumerate(params)}
        members = {
            (index, number): param.device
            for index, param in enumerate(params)
            for number in range(len(plans[index].pieces))
        }
        book = self._active_book = self.books.of(group)
        batches = HalfBatches(self.newton_schulz, plans, members, book)
        for run in runs_of(params):
            updates = self._local_updates(group, run)
            found = {
                (index, number): piece.read(update)
                for index, update in zip((positions[id(param)] for param in run), updates, strict=True)
                for number, piece in enumerate(plans[index].pieces)
            }
            del updates
            for results in batches.fill(found):
                self._apply(group, params, self._changes(plans, results))
        group["ns_plan"] = book.text

    def _changes(
        self, plans: Sequence[MatrixPlan], results: Iterable[tuple[tuple[int, int], Scaled]]
    ) -> Iterator[Change]:
        for (index, number), o in results:
            piece, scaled = plans[index].pieces[number], o.times(plans[index].scales[number])
            yield Change(index, piece, piece.fold(scaled.values), scaled.scale)

    def _step_params(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        self._apply(group, params, self._transform(group, params, self._local_updates(group, params)))

    def _local_updates(self, group: dict[str, Any], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decay parameters, move their momentum, and return what is to be orthogonalized: element by element."""
        grads = [gradient_of(param) for param in params]
        buffers: list[torch.Tensor] = [self.state[param]["momentum_buffer"] for param in params]
        swept = [self._is_swept(param, grad) for param, grad in zip(params, grads, strict=True)]
        late = self._late_decays(group, params)
        early = [late[param.dtype] is None for param in params]
        updates, self._squares = self.local_step.updates(
            group, params, grads, buffers, swept=swept, early=early
        )
        return updates

    def _transform(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]
    ) -> Iterator[Change]:
        """Orthogonalize whole updates; each change is valid until the next is asked for."""
        plans = [self.planner.plan(param) for param in params]
        book = self._active_book = self.books.of(group)
        custom = self._is_customized()
        together = [index for index, plan in enumerate(plans) if not plan.gather_first and not custom]
        for position, number, o in orthogonalize_pieces(
            self.newton_schulz,
            [plans[index] for index in together],
            [updates[index] for index in together],
            book,
            [self._squares.get(index) for index in together],
        ):
            index = together[position]
            piece = plans[index].pieces[number]
            yield Change(index, piece, piece.fold(o.values), o.scale)
        for index in sorted(set(range(len(params))) - set(together)):
            settings = {key: value for key, value in group.items() if key != "params"}
            yield Change(index, None, self.orthogonalize(params[index], updates[index], **settings))
        group["ns_plan"] = book.text

    def _apply(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], changes: Iterable[Change]
    ) -> None:
        """Subtract what was transformed, times the learning rate: element by element."""
        workspace, decays = self.newton_schulz.workspace, self._late_decays(group, params)
        # A CPU uses the memory of a change again, and what a subclass does to one parameter goes before the next.
        together = all(param.device.type != "cpu" for param in params) and not self._is_customized()
        if together and not isinstance(group["lr"], torch.Tensor):
            changes = applied_together(changes, params, group["lr"], decays)
        for change in changes:
            param = params[change.index]
            decay = decays[param.dtype]
            if change.piece is None:
                self.pre_weight_update_fn_inplace(param, change.values)
            change.apply(param, group["lr"], workspace, decay)
            if change.piece is None:
                self.post_weight_update_fn_inplace(param)

    def _is_swept(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether an update is written in 16 bits while it is made: where its matrices are iterated so, one by one."""
        plan = self.planner.plan(param)
        return not self._is_customized() and is_swept(self.newton_schulz, plan, param, grad)

    def _late_decays(
        self, group: dict[str, Any], params: Sequence[torch.Tensor]
    ) -> dict[torch.dtype, Decay | None]:
        custom = self._is_customized()
        dtypes = {param.dtype for param in params}
        return {dtype: self.local_step.late_decay(group, dtype, is_customized=custom) for dtype in dtypes}

    def _is_customized(self) -> bool:
        cls: Hashable = type(self)  # type: ignore[assignment] # mypy asks the class's instances
        return _is_customized(cls)


@cache
def _is_customized(cls: Hashable) -> bool:
    """Whether a subclass replaces what is done per parameter: asked several times for each."""
    owners = {
        "orthogonalize": MatrixSteps,
        "pre_weight_update_fn_inplace": OrthogonalizedOptimizer,
        "post_weight_update_fn_inplace": OrthogonalizedOptimizer,
    }
    return any(getattr(cls, name) is not getattr(owner, name) for name, owner in owners.items())
