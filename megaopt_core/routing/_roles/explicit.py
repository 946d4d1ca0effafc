"""What users and plugins say themselves: attributes on parameters, annotations, registered views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve
from torch import nn

from megaopt_core.errors import ViewError
from megaopt_core.params._names import NamedParam
from megaopt_core.params._roles import Doubt, Role, RoleDecision
from megaopt_core.params._views import MATRIX, Fused, MatrixView
from megaopt_core.routing._roles.registered_views import registered_view

__all__ = ["apply_explicit", "cut_by_attributes"]

type Description = tuple[Role | MatrixView, str]

_EMBEDDING = "is_embedding_parameter"
_MARKS = ("is_embedding_or_output_parameter", _EMBEDDING)


def apply_explicit(
    entry: NamedParam, found: RoleDecision, annotations: Mapping[str, Role | MatrixView]
) -> RoleDecision:
    """Return the decision after everything that was said about a parameter.

    Args:
        entry: the parameter.
        found: what the rules found by themselves.
        annotations: what plugins say, by canonical name.

    Raises:
        ViewError: two descriptions contradict each other, or a view does not fit the parameter.
    """
    descriptions = _from_attributes(entry) or _from_others(entry, annotations)
    if descriptions:
        said, who = _agreed(entry.name, descriptions)
        found = _decided(entry, found, said, who)
    return _flags(entry, found)


def _from_attributes(entry: NamedParam) -> list[Description]:
    found: list[Description] = []
    param = entry.param
    view = getattr(param, "matrix_view", None)
    if isinstance(view, str) and view in [*Role]:
        view = Role(view)
    if view is not None and not isinstance(view, Role | MatrixView):
        raise ViewError(f"{entry.name}: attribute matrix_view must be a MatrixView or a Role, got {view!r}")
    if view is not None:
        found.append((view, "attribute matrix_view"))
    sizes = getattr(param, "qkv_split_shapes", None)
    if getattr(param, "is_qkv", False) and sizes is not None:
        found.append((_query_groups(entry.name, sizes), "attributes is_qkv and qkv_split_shapes"))
    if getattr(param, _EMBEDDING, False) and param.dim() > 1:
        found.append((Role.EMBEDDING, f"attribute {_EMBEDDING}"))
    elif getattr(param, _MARKS[0], False):
        found.append((Role.OUTPUT, f"attribute {_MARKS[0]}"))
    return found


def _query_groups(name: str, sizes: Sequence[int]) -> MatrixView:
    """Return the view of query, key and value group by group: each has one head of keys and one of values."""
    if not isinstance(sizes, Sequence) or not all(type(size) is int for size in sizes):
        raise ViewError(
            f"{name}: attribute qkv_split_shapes must be whole numbers, got {sizes!r}", names=[name]
        )
    head = sizes[-1] if sizes else 0
    known = head > 0 and all(size % head == 0 for size in sizes)
    heads = (head,) * len(sizes) if known else ()
    return MatrixView(split_sizes=tuple(sizes), label="qkv", fused=Fused.QKV, head_sizes=heads)


def _from_others(entry: NamedParam, annotations: Mapping[str, Role | MatrixView]) -> list[Description]:
    found: list[Description] = [
        (annotations[name], f"a plugin's annotation of {name!r}")
        for name in (entry.name, *entry.aliases)
        if name in annotations
    ]
    for _, module, attribute in entry.owners:
        registered = registered_view(entry.name, module, attribute)
        if registered is not None:
            found.append((registered[0], str(registered[1])))
    return found


def _agreed(name: str, said: list[Description]) -> Description:
    """Return the one thing that all descriptions say; a view says more than the role `MATRIX`."""
    best, who = said[0]
    for other, source in said[1:]:
        if best == other or (other is Role.MATRIX and isinstance(best, MatrixView)):
            continue
        if best is Role.MATRIX and isinstance(other, MatrixView):
            best, who = other, source
            continue
        raise ViewError(
            f"{name}: two descriptions contradict each other: {who} says {_words(best)}, {source} says {_words(other)}"
        )
    return best, who


def _words(said: Role | MatrixView) -> str:
    return f"role {said.value!r}" if isinstance(said, Role) else str(said)


def _decided(entry: NamedParam, found: RoleDecision, said: Role | MatrixView, who: str) -> RoleDecision:
    if isinstance(said, MatrixView):
        return _as_matrix(entry, said, who)
    if said is Role.MATRIX:
        return _as_found(_as_matrix(entry, found.view or MATRIX, who), found)
    if said is Role.ELEMENTWISE:
        return RoleDecision.elementwise(who)
    if said is Role.EMBEDDING:
        return RoleDecision.embedding(who)
    is_table = who.startswith("attribute is_embedding") and _is_table(entry, found)
    return RoleDecision.embedding(f"{who}; {found.reason}") if is_table else RoleDecision.output(who)


def _is_table(entry: NamedParam, found: RoleDecision) -> bool:
    """Return whether a parameter that is marked as an embedding or output is the first of the two."""
    if getattr(entry.param, _EMBEDDING, None) is False:
        return False
    named = any(type(module).__name__.endswith(("Embedding", "Embeddings")) for _, module, _ in entry.owners)
    return found.role is Role.EMBEDDING or (named and found.doubt is Doubt.ROLE)


def cut_by_attributes(param: nn.Parameter) -> bool:
    """Return whether attributes say that a parameter is a rank's part: a view describes the whole of it.

    Args:
        param: the parameter.
    """
    return bool(getattr(param, "tensor_model_parallel", False)) and getattr(param, "partition_dim", -1) != -1


def _as_matrix(entry: NamedParam, view: MatrixView, who: str) -> RoleDecision:
    try:
        if not cut_by_attributes(entry.param):
            view.matrix_shapes(tuple(entry.param.shape))
    except ViewError as error:
        raise ViewError(f"{entry.name}: {who}: {error}") from None
    return RoleDecision.matrix(who, view)


def _flags(entry: NamedParam, decision: RoleDecision) -> RoleDecision:
    """Apply `use_muon`, and an explicit False of the marks of embeddings and outputs."""
    param, decision = entry.param, _denied(entry, decision)
    use_muon = getattr(param, "use_muon", None)
    if use_muon is None:
        return decision
    if not use_muon and decision.role is Role.MATRIX:
        return RoleDecision.elementwise("attribute use_muon is False")
    if not use_muon:
        return evolve(decision, doubt=Doubt.NONE)
    settles = decision.role is not Role.MATRIX or decision.doubt is Doubt.ROLE
    if param.dim() > 1 and not param.dtype.is_complex and settles:
        marks = [mark for mark in _MARKS if getattr(param, mark, False)]
        if marks:
            raise ViewError(
                f"{entry.name}: two descriptions contradict each other: attribute use_muon says role 'matrix', "
                f"attribute {marks[0]} says an embedding{'' if marks[0] == _EMBEDDING else ' or output'}"
            )
        return _as_found(RoleDecision.matrix("attribute use_muon is True", decision.view or MATRIX), decision)
    return decision


def _denied(entry: NamedParam, decision: RoleDecision) -> RoleDecision:
    """Return the decision after an explicit False: of the mark of embeddings, or of that of both."""
    denied = [mark for mark in _MARKS if getattr(entry.param, mark, None) is False]
    if decision.role is Role.OUTPUT:
        denied = [mark for mark in denied if mark != _EMBEDDING]
    if not denied or not decision.role.is_embedding_or_output:
        return decision
    why = f"attribute {denied[0]} is False"
    is_projected = any(not isinstance(module, nn.Embedding) for _, module, _ in entry.owners)
    if decision.role is Role.OUTPUT and entry.param.dim() > 1 and is_projected:
        return _as_found(RoleDecision.matrix(why, decision.view or MATRIX), decision)
    return RoleDecision.elementwise(why)


def _as_found(said: RoleDecision, found: RoleDecision) -> RoleDecision:
    """Return a matrix of which only that was said: which matrices lie inside is as sure as whoever found it."""
    said = evolve(said, reader=found.reader, no_forward=found.no_forward)
    unknown = found.role in (Role.ELEMENTWISE, Role.EMBEDDING) and found.view is None
    if found.doubt is Doubt.LAYOUT or found.unread or unknown:
        why = f"the matrices inside it are not known; {found.reason.partition('; ')[2]}".rstrip("; ")
        return said.doubted(why, Doubt.LAYOUT)
    return said
