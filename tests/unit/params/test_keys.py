"""Keys match parameters by any entry of any field."""

import pytest
import torch

from megaopt_core import ParamKey, ParamPredicate, ParamWithNamePredicate, Role
from megaopt_core.errors import OverrideError

WEIGHT = torch.nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        (ParamKey(name="*.bias"), "layers.0.bias", True),
        (ParamKey(name="*.bias"), "bias", False),
        (ParamKey(name="*.Bias"), "layers.0.bias", False),
        (ParamKey(name="layers.?.w[ab]"), "layers.3.wb", True),
        (ParamKey(name=("nothing", "l*")), "layers.0.bias", True),
    ],
)
def test_names_are_case_sensitive_globs_whose_star_crosses_dots(key, name, expected):
    """A name pattern is a Unix glob against the whole qualified name."""
    assert key.matches(WEIGHT, name) is expected


def test_an_attribute_matches_when_it_is_truthy():
    """An attribute that is absent or falsy does not match."""
    param = torch.nn.Parameter(torch.zeros(2))
    key = ParamKey(attr=("shared", "tagged"))
    assert not key.matches(param, "p")
    param.tagged = 0
    assert not key.matches(param, "p")
    param.tagged = 1
    assert key.matches(param, "p")


def test_any_field_is_enough():
    """The fields are joined by OR."""
    vector = ParamPredicate(name="vector", fn=lambda param: param.dim() == 1)
    late = ParamWithNamePredicate(name="late", fn=lambda param, name: name.startswith("layers.9"))
    key = ParamKey(name="head.*", predicate=vector, with_name_predicate=(late,))
    assert key.matches(WEIGHT, "head.weight")
    assert key.matches(torch.nn.Parameter(torch.zeros(3)), "x")
    assert key.matches(WEIGHT, "layers.9.weight")
    assert not key.matches(WEIGHT, "layers.8.weight")


def test_roles_match_only_where_roles_are_known():
    """A role is matched by routing, which knows it; `matches` does not."""
    key = ParamKey(role=Role.EMBEDDING)
    assert not key.matches(WEIGHT, "w")
    assert key.matched_by(WEIGHT, "w", Role.EMBEDDING) == "role 'embedding'"
    assert key.matched_by(WEIGHT, "w", Role.MATRIX) is None


def test_predicates_compare_and_hash_by_name_alone():
    """Two predicates of one name are one, whatever they compute."""
    one, other = (
        ParamPredicate(name="s1", fn=lambda param, answer=answer: answer) for answer in (True, False)
    )
    assert one == other
    assert {ParamKey(predicate=one): 1} == {ParamKey(predicate=(other,)): 1}
    assert ParamWithNamePredicate(name="a", fn=min) == ParamWithNamePredicate(name="a", fn=max)
    assert ParamWithNamePredicate(name="a", fn=min) != ParamWithNamePredicate(name="b", fn=min)


def test_a_field_of_another_type_is_refused():
    """The error names field, type and value."""
    with pytest.raises(OverrideError) as caught:
        ParamKey(name=3)
    assert str(caught.value) == "ParamKey(name=...) takes str or a tuple of them, got int: 3"


def test_a_role_may_be_given_by_its_name():
    """As the documentation writes it; a wrong name is answered with the right ones."""
    assert ParamKey(role="embedding") == ParamKey(role=Role.EMBEDDING)
    assert ParamKey(role=["output", Role.MATRIX]).role == (Role.OUTPUT, Role.MATRIX)
    with pytest.raises(
        OverrideError,
        match=r"^ParamKey\(role='embeding'\): must be one of 'embedding', 'output', 'matrix', 'elementwise'$",
    ):
        ParamKey(role="embeding")
    with pytest.raises(
        OverrideError, match=r"^ParamKey\(role=\.\.\.\) takes Role or a tuple of them, got int: 3$"
    ):
        ParamKey(role=3)


def test_a_key_reads_as_it_was_written():
    """`str` leaves out what is empty."""
    key = ParamKey(name="*.bias", predicate=ParamPredicate(name="v", fn=bool), role=Role.OUTPUT)
    assert str(key) == "ParamKey(name=('*.bias',), predicate=('v',), role=('output',))"


@pytest.mark.parametrize("given", ["*.bias", ("*.bias",), ("a", "b")])
def test_a_field_reads_back_as_it_was_given(given):
    """One name stays one name, as in the trainers that keys come from."""
    assert (ParamKey(name=given).name, ParamKey(attr=given).attr) == (given, given)
    assert ParamKey(name=["a", "b"]).name == ("a", "b")
    assert ParamKey(attr="x").name == ()


def test_one_value_and_a_tuple_of_it_are_one_key():
    """Else the same override could be given twice."""
    one, other = ParamKey(name="*.bias"), ParamKey(name=("*.bias",))
    assert (one == other, hash(one) == hash(other), str(one) == str(other)) == (True, True, True)


@pytest.mark.parametrize("fields", [{}, {"name": ()}, {"name": [], "attr": ()}])
def test_a_key_that_can_match_nothing_is_refused(fields):
    """An empty list of names would make an override that does nothing, in silence."""
    with pytest.raises(OverrideError) as caught:
        ParamKey(**fields)
    assert str(caught.value) == (
        "ParamKey() matches nothing: give a name, an attr, a predicate, a with_name_predicate or a role"
    )
