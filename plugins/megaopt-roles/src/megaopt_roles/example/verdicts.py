"""What the meetings of an example say about roles, beside what the source says."""

from __future__ import annotations

from attrs import evolve

from megaopt_core.params import Doubt, MatrixView, NamedParam, Role, RoleDecision
from megaopt_core.routing import elementwise, embedding, matrix, output
from megaopt_roles.example.meetings import Meetings
from megaopt_roles.example.states import Meeting

__all__ = ["with_example"]


def with_example(
    entry: NamedParam, read: RoleDecision, seen: Meetings, *, is_known: bool = False
) -> RoleDecision:
    """Return the decision about a parameter after an example was run; where both speak and differ, the example wins.

    Args:
        entry: the parameter, of two or more dimensions.
        read: what its module's type and source say.
        seen: what the example showed.
        is_known: the source shows, too, that a layer takes the output of what it calls a head, or that what it calls
            hidden weighs what is returned.
    """
    keys = [id(param) for param in (entry.param, *entry.twins)]
    meeting = Meeting()
    for key in keys:
        own = seen.by_param.get(key, Meeting())
        meeting.kinds |= own.kinds
        meeting.widths |= own.widths
        meeting.transposed |= own.transposed
    shown = _shown(tuple(entry.param.shape), keys, meeting, read, seen)
    if shown is None:
        return read
    if read.role is Role.ELEMENTWISE and read.doubt is Doubt.LAYOUT:
        return read  # a product contracts it, which is what the example shows, and no view has its axes
    if read.role is Role.ELEMENTWISE and read.doubt is Doubt.NONE and "joint" in meeting.kinds:
        return read  # a gain, or what scales noise, of what the product contracts
    if is_known and read.doubt is Doubt.NONE and {read.role, shown.role} == {Role.OUTPUT, Role.MATRIX}:
        return read  # a head for another reason than that nothing takes it, or a gate
    if _kind(shown.role) == _kind(read.role):
        if read.doubt is not Doubt.ROLE:
            return read
        whole = read.view is not None and not read.view.split_sizes  # a guess as well, then
        view = _view(tuple(entry.param.shape), meeting) if whole else None
        return evolve(read, doubt=Doubt.NONE, view=view or read.view)
    return evolve(shown, reason=f"{shown.reason}; the source says {read.role.value}: {read.reason}")


def _kind(role: Role) -> str:
    """Return what the two are compared by: tables and gains are stepped alike."""
    return "table or gain" if role in (Role.EMBEDDING, Role.ELEMENTWISE) else role.value


def _shown(
    shape: tuple[int, ...], keys: list[int], meeting: Meeting, read: RoleDecision, seen: Meetings
) -> RoleDecision | None:
    """Return what the example shows by itself; None where it does not tell."""
    kinds = set(meeting.kinds)
    if len(shape) > 2 and "contracted" in kinds:
        kinds.discard("looked_up")  # one matrix of a stack after the other
    if sum(size > 1 for size in shape) < 2:
        return None
    if "indexed" in kinds and len(shape) == 2:
        return embedding("the example indexes it with what it is given")
    if "contracted" not in kinds:
        # A product of parameters, what activations are added to for a weight, and a kernel that is modulated before a
        # convolution, stay with the source.
        silent = not kinds or {"factor", "sum"} & kinds or (len(shape) > 3 and "elementwise" in kinds)
        return None if silent else elementwise("no matrix product of the example contracts it")
    if kinds - {"joint"} != {"contracted"} or seen.consumed & seen.ended & {*keys}:
        return None  # a table that is contracted, too, or a head that is read back: what it is stays with the source
    if seen.consumed.intersection(keys):
        view = read.view or _view(shape, meeting)
        return (
            None
            if view is None
            else matrix("another layer takes the output of its product in the example", view)
        )
    if (seen.ended - seen.compared).intersection(keys) and not meeting.widths & seen.hidden:
        return output("the last product before the output of the example")
    return None


def _view(shape: tuple[int, ...], meeting: Meeting) -> MatrixView | None:
    if len(meeting.transposed) != 1 or None in meeting.transposed:
        return None
    return MatrixView(batch_dims=len(shape) - 2, transposed=True in meeting.transposed)
