"""Owner plans: deterministic, complete, balanced, and honest about what they cost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_layerwise.planner import OwnerPolicy, Work, ping_pong, plan_owners

from megaopt_core.errors import ShardingError

POLICIES = pytest.mark.parametrize("policy", list(OwnerPolicy))


def uniform(count, cost=6.0):
    """Return equal works."""
    return [Work(f"w{index}", cost, numel=64, state_bytes=512, bucket=index // 8) for index in range(count)]


@st.composite
def problems(draw):
    """Return some works and a number of ranks that can own them."""
    ranks = draw(st.integers(1, 9))
    works = []
    for index in range(draw(st.integers(0, 12))):
        able = draw(st.none() | st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted))
        numel = draw(st.integers(0, 1000))
        cost = float(draw(st.integers(0, 10_000)))
        works.append(Work(f"w{index}", cost, numel, 8 * numel, bucket=draw(st.integers(0, 3)), ranks=able))
    return works, ranks


@POLICIES
@given(problem=problems(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_everything_has_one_owner_that_can_own_it_whatever_the_order(policy, problem, seed):
    """Ranks see works in one order, and would agree in any other."""
    works, ranks = problem
    plan = plan_owners(works, ranks, policy=policy)
    assert list(plan.owners) == [work.name for work in works]
    for work in works:
        owners = plan.owners[work.name].ranks
        assert set(owners) <= set(range(ranks) if work.ranks is None else work.ranks)
    shuffled = random.Random(seed).sample(works, len(works))  # noqa: S311 - nothing secret
    assert plan_owners(shuffled, ranks, policy=policy).owners == plan.owners
    assert sum(plan.numels) == sum(work.numel for work in works)
    assert len(plan.costs) == len(plan.state_bytes) == len(plan.seconds) == ranks


@POLICIES
def test_equal_works_are_shared_out_equally(policy):
    """Every rank has as many."""
    plan = plan_owners(uniform(32), 8, policy=policy)
    assert plan.compute_imbalance == plan.memory_imbalance == 1.0


def test_loads_are_carried_from_bucket_to_bucket():
    """Two buckets with one large and one small work each: the large ones go to different ranks."""
    works = [
        Work(f"{size}{bucket}", cost, 1, 8, bucket)
        for bucket in (0, 1)
        for size, cost in (("a", 3), ("b", 1))
    ]
    plan = plan_owners(works, 2, policy=OwnerPolicy.BUCKET)
    assert plan.owners["a0"] != plan.owners["a1"]
    assert plan.compute_imbalance == 1.0


def test_no_rank_holds_much_more_state_than_the_others():
    """Cheap works with much state would otherwise all go to one rank."""
    heavy = [Work(f"h{index}", 100.0, 10, 80) for index in range(4)]
    light = [Work(f"l{index}", 1.0, 100, 800) for index in range(40)]
    plan = plan_owners([*heavy[:1], *light], 4)
    assert plan.memory_imbalance <= 1.1


def test_ping_pong_deals_forwards_and_backwards():
    """The example of the reference."""
    assert ping_pong(range(10), 4) == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]
    assert ping_pong([], 3) == [[], [], []]
    assert ping_pong([5, 5, 1], 2) == [[2], [0, 1]]


@pytest.mark.parametrize(
    ("works", "ranks", "message"),
    [
        ([Work("w", 1.0, 1, 1.0)], 0, "plan_owners: 0 ranks; there is at least 1"),
        ([Work("w", 1.0, 1, 1.0)] * 2, 2, "plan_owners: two works are called 'w'"),
        (
            [Work("w", 1.0, 1, 1.0, ranks=(1, 2))],
            2,
            "plan_owners: 'w' names the ranks (1, 2); there are 0 to 1",
        ),
    ],
)
def test_what_makes_no_sense_is_named(works, ranks, message):
    """With what is allowed."""
    with pytest.raises(ShardingError) as raised:
        plan_owners(works, ranks)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cost": -1.0}, "Work('w'): cost, elements and bytes are not negative"),
        ({"matrices": 0}, "Work('w'): matrices=0 and most_peers=1 are at least 1"),
        ({"ranks": (2, 1)}, "Work('w'): ranks=(2, 1) must be ascending, with at least one"),
        ({"ranks": ()}, "Work('w'): ranks=() must be ascending, with at least one"),
    ],
)
def test_works_with_numbers_out_of_range_are_refused(wrong, message):
    """When they are made."""
    with pytest.raises(ShardingError) as raised:
        Work(**{"name": "w", "cost": 1.0, "numel": 1, "state_bytes": 1.0, **wrong})
    assert str(raised.value) == message
