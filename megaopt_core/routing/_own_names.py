"""Names that mean one tensor on all ranks: what goes by name, such as a save, would mix up others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from megaopt_core.params._names import shown

__all__ = ["stages_of_names", "wrong_names"]

_ADVICE = (
    "give build_optimizer and the save fqn=lambda chunk, name: ..., which returns the name that the whole model has: "
    're.sub(r"(layers|experts)\\.(\\d+)", lambda found: f"{found[1]}.{int(found[2]) + FIRST}", name), with the number '
    "FIRST of this rank's first layer or expert"
)


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


def wrong_names(of_ranks: Iterable[Mapping[str, Iterable[int]]]) -> str | None:
    """Return what is wrong with names that several places have, and what to do; None where there are none.

    Args:
        of_ranks: what :func:`stages_of_names` returned on each.
    """
    seen: dict[str, set[int]] = defaultdict(set)
    for of_rank in of_ranks:
        for name, at in of_rank.items():
            seen[name].update(at)
    twice = sorted({name.partition(":")[2] for name, at in seen.items() if len(at) > 1})
    if not twice:
        return None
    return (
        f"ranks of a pipeline or an expert group have different tensors of one name: {shown(twice)}. Each numbers its "
        f"own from 0: {_ADVICE}"
    )
