"""Collections of process groups: which groups follow from others, and which must be given."""

import pytest
from attrs import frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ParallelGroupError


@frozen(eq=False)
class Group:
    """What a collection reads of a process group."""

    ranks: int

    def size(self) -> int:
        """Return the number of ranks."""
        return self.ranks


ONE, TWO, THREE, FOUR = Group(1), Group(2), Group(3), Group(4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"tp": TWO}, TWO),
        ({"pp": TWO}, TWO),
        ({"tp": TWO, "pp": ONE}, TWO),
        ({"tp": ONE, "pp": TWO}, TWO),
        ({"tp": ONE, "pp": ONE}, None),
        ({"tp": TWO, "mp": FOUR}, FOUR),
        ({"tp": TWO, "pp": TWO, "mp": FOUR}, FOUR),
    ],
)
def test_norms_add_up_over_the_only_group_that_divides_the_model(given, expected) -> None:
    """`mp` is the larger one of `tp` and `pp`, unless it is given."""
    assert ProcessGroupCollection(**given).mp is expected
    assert ProcessGroupCollection.of(given).stats_group() is expected


@pytest.mark.parametrize("make", [lambda given: ProcessGroupCollection(**given), ProcessGroupCollection.of])
def test_two_groups_that_divide_the_model_need_one_that_joins_them(make) -> None:
    """Which ranks hold one replica does not follow from `tp` and `pp`."""
    with pytest.raises(ParallelGroupError, match=r"tp \(2 ranks\) and pp \(3 ranks\).*mp is not given"):
        make({"tp": TWO, "pp": THREE})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tp": TWO}, TWO),
        ({"tp": TWO, "expt_tp": ONE}, ONE),
        ({"ep": TWO}, TWO),
        ({"ep": TWO, "tp": FOUR, "expt_tp": ONE}, TWO),
        ({"tp": TWO, "pp": TWO, "mp": FOUR}, FOUR),
        ({"tp": TWO, "ep": TWO, "tp_ep_pp": FOUR}, FOUR),
    ],
)
def test_norms_of_experts_add_up_over_the_group_that_divides_them(given, expected) -> None:
    """Experts have a tensor-parallel group of their own where one is given, and are divided over `ep` too."""
    assert ProcessGroupCollection(**given).stats_group(is_expert=True) is expected


def test_experts_that_two_groups_divide_need_one_that_joins_them() -> None:
    """A model without experts is not asked for it."""
    groups = ProcessGroupCollection(tp=TWO, ep=THREE)
    assert groups.stats_group() is TWO
    with pytest.raises(ParallelGroupError, match=r"of \[2, 3, 1\] ranks, but tp_ep_pp is not given"):
        groups.stats_group(is_expert=True)
