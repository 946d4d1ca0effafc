"""What Muon tells the report of each parameter: how its matrices are iterated, and what ranks do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megaopt_muon.choice.methods import is_narrow
from megaopt_muon.choice.plan_text import ONEDNN, parsed_plan
from megaopt_muon.choice.schedule import plan_blocks
from megaopt_muon.choice.spectrum import Spectrum
from megaopt_muon.pieces.batches import is_single
from megaopt_muon.products.onednn import is_multiplied
from megaopt_muon.products.precision import compute_dtype

if TYPE_CHECKING:
    import torch

    from megaopt_core.params import MatrixView
    from megaopt_muon.choice.books import GroupBooks
    from megaopt_muon.newton_schulz.iteration import NewtonSchulz
    from megaopt_muon.pieces.planner import Planner
    from megaopt_muon.pieces.plans import MatrixPlan

__all__ = ["param_notes"]


def param_notes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return how each parameter is orthogonalized, by its name; before the first step, which fused ones are left whole.

    Args:
        optimizer: a Muon.
    """
    found = {}
    ns: NewtonSchulz = optimizer.newton_schulz  # type: ignore[attr-defined] # the entry pairs them
    planner: Planner = optimizer.planner  # type: ignore[attr-defined]
    books: GroupBooks = optimizer.books  # type: ignore[attr-defined]
    plans = planner.known
    for group in optimizer.param_groups:
        named = ((param, getattr(param, "param_info", None)) for param in group["params"])
        for param, info in named:
            if info is None:
                continue
            notes = []
            if info.view is not None and _is_left_whole(info.view, planner.view(param)):
                notes.append("not split")
            plan = plans.get(info.name)
            if plan is not None:
                notes += _notes(ns, plan, param, parsed_plan(books.of(group).text))
            found[info.name] = "; ".join(notes)
    return {name: note for name, note in found.items() if note}


def _is_left_whole(view: MatrixView, taken: MatrixView) -> bool:
    """Return whether the report shows pieces of a weight that is orthogonalized as it is stored."""
    return bool(view.split_sizes) and not taken.split_sizes


def _notes(
    ns: NewtonSchulz, plan: MatrixPlan, param: torch.Tensor, methods: Mapping[tuple[int, int], str]
) -> Iterator[str]:
    used = {}
    for piece in plan.pieces:
        rows, columns = _gathered(piece.shape, plan)
        method = _method(ns, plan, piece.shape, param, methods)
        # A method that was asked for is told of every matrix, also where another is taken.
        used[f"{rows}x{columns}"] = (
            f"{method} (not gram)" if (ns.method, method) == ("gram", "plain") else method
        )
    if len(set(used.values())) == 1:
        yield next(iter(used.values()))
    elif used:
        yield ", ".join(f"{shape} {method}" for shape, method in used.items())
    if any(piece.has_heads for piece in plan.pieces):
        yield f"{sum(piece.shape[-3] for piece in plan.pieces if piece.has_heads)} heads"
    if plan.cut is not None:
        mode = "gathered" if plan.gather_first else plan.cut.mode
        yield f"{mode} over {plan.cut.group.size()} ranks"


def _method(
    ns: NewtonSchulz,
    plan: MatrixPlan,
    shape: tuple[int, ...],
    param: torch.Tensor,
    methods: Mapping[tuple[int, int], str],
) -> str:
    """Return how a matrix is iterated: as the plan says, where there is a choice."""
    dtype = compute_dtype(ns.precision, param.dtype, param.device)
    narrow = is_narrow(dtype, param.device)
    cut = None if plan.cut is None or plan.gather_first else plan.cut
    if cut is not None and cut.mode == "distributed":
        kept, summed = shape[-2:] if cut.dim == 1 else shape[:-3:-1]
        blocks = plan_blocks(ns.method, ns.coefficients, kept, summed, param.device, dtype, Spectrum.UNKNOWN)
        return "plain" if narrow or set(blocks) == {1} else "gram"
    gathered = cut is not None and cut.mode == "duplicated" and len(shape) == 2
    if narrow and not gathered and not is_single(ns, shape, param.dtype, param.device):
        return "plain"  # matrices of 16 bits that go together
    small, large = sorted(_gathered(shape, plan))
    method = methods.get((small, large), "plain")
    # A matrix of the same shape may be of another dtype.
    return method if is_multiplied(small, dtype, param.device) else method.removesuffix(ONEDNN)


def _gathered(shape: tuple[int, ...], plan: MatrixPlan) -> tuple[int, int]:
    """Return rows and columns of a matrix as it is iterated, from the shape of a piece."""
    rows, columns = shape[-2:]
    if plan.cut is None or plan.gather_first or plan.cut.mode != "duplicated":
        return rows, columns
    ranks = plan.cut.group.size()
    return (rows * ranks, columns) if plan.cut.dim == 0 else (rows, columns * ranks)
