"""What Muon tells the report of each parameter: how its matrices are iterated, and what ranks do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megaopt_muon.choice.methods import parsed_plan

if TYPE_CHECKING:
    import torch

    from megaopt_muon.choice.books import GroupBooks
    from megaopt_muon.pieces.plans import MatrixPlan

__all__ = ["param_notes"]


def param_notes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return how each parameter is orthogonalized, by its name; empty before the first step.

    Args:
        optimizer: a Muon.
    """
    found = {}
    plans: Mapping[str, MatrixPlan] = optimizer.known_plans  # type: ignore[attr-defined] # the entry pairs them
    # A method that was asked for is told of every matrix, also where it does not pay and another is taken.
    otherwise = None if optimizer.newton_schulz.method == "auto" else "plain"  # type: ignore[attr-defined]
    books: GroupBooks = optimizer.books  # type: ignore[attr-defined]
    groups = ((param, group) for group in optimizer.param_groups for param in group["params"])
    for param, group in groups:
        info = getattr(param, "param_info", None)
        plan = None if info is None else plans.get(info.name)
        if info is not None and plan is not None:
            found[info.name] = "; ".join(_notes(plan, parsed_plan(books.of(group).text), otherwise))
    return {name: note for name, note in found.items() if note}


def _notes(plan: MatrixPlan, methods: Mapping[tuple[int, int], str], otherwise: str | None) -> Iterator[str]:
    used = {}
    for piece in plan.pieces:
        rows, columns = _gathered(piece.shape, plan)
        small, large = sorted((rows, columns))
        method = methods.get((small, large), otherwise)
        if method is not None:
            used[f"{rows}x{columns}"] = method
    if len(set(used.values())) == 1:
        yield next(iter(used.values()))
    elif used:
        yield ", ".join(f"{shape} {method}" for shape, method in used.items())
    if any(piece.has_heads for piece in plan.pieces):
        yield f"{sum(piece.shape[-3] for piece in plan.pieces if piece.has_heads)} heads"
    if plan.cut is not None:
        mode = "gathered" if plan.gather_first else plan.cut.mode
        yield f"{mode} over {plan.cut.group.size()} ranks"


def _gathered(shape: tuple[int, ...], plan: MatrixPlan) -> tuple[int, int]:
    """Return rows and columns of a matrix as it is iterated, from the shape of a piece."""
    rows, columns = shape[-2:]
    if plan.cut is None or plan.gather_first or plan.cut.mode != "duplicated":
        return rows, columns
    ranks = plan.cut.group.size()
    return (rows * ranks, columns) if plan.cut.dim == 0 else (rows, columns * ranks)
