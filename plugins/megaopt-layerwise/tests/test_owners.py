"""Owner plans: deterministic, complete, balanced, and honest about what they cost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_layerwise.planner import (
    Carried,
    CostModel,
    Division,
    OwnerPolicy,
    Work,
    ping_pong,
    plan_owners,
)
from megaopt_layerwise.planner.blocks import block_sizes

from megaopt_core.errors import ShardingError

pytestmark = pytest.mark.any_python

POLICIES = pytest.mark.parametrize("policy", list(OwnerPolicy))


def uniform(count: int, cost: float = 6.0) -> list[Work]:
    """Return equal works."""
    return [Work(f"w{index}", cost, numel=64, state_bytes=512, bucket=index // 8) for index in range(count)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Work], int]:
    """Return some works and a number of ranks that can own them."""
    ranks = draw(st.integers(1, 9))
    works = []
    for index in range(draw(st.integers(0, 12))):
        able = draw(st.none() | st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted))
        numel = draw(st.integers(0, 1000))
        cost = float(draw(st.integers(0, 10_000)))
        divides = {
            "matrices": draw(st.sampled_from([1, 1, 2, 7])),
            "most_peers": draw(st.sampled_from([1, 2, 64])),
            "repeated": draw(st.sampled_from([0.0, 0.2])),
            "exchanged": draw(st.sampled_from([0.0, 1e3])),
        }
        bucket = draw(st.integers(0, 3))
        works.append(Work(f"w{index}", cost, numel, 8 * numel, bucket=bucket, ranks=able, **divides))
    return works, ranks


@POLICIES
@given(problem=problems(), seed=st.integers(0, 99))
@settings(max_examples=60)
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


@given(problem=problems(), seed=st.integers(0, 99))
@settings(max_examples=100)
def test_divided_works_lose_nothing_and_keep_their_blocks(problem, seed):
    """Every matrix of a batch has one owner; peers are consecutive ranks from a multiple of their number on."""
    works, ranks = problem
    model = CostModel(operations_per_second=1e3, latency=0.0)
    plan = plan_owners(works, ranks, divisions=list(Division), model=model)
    shuffled = random.Random(seed).sample(works, len(works))  # noqa: S311 - nothing secret
    assert plan_owners(shuffled, ranks, divisions=list(Division), model=model).owners == plan.owners
    for work in works:
        owners = plan.owners[work.name]
        assert set(owners.ranks) <= set(range(ranks) if work.ranks is None else work.ranks)
        assert list(owners.ranks) == sorted(set(owners.ranks))
        if owners.division is Division.WHOLE:
            assert len(owners.ranks) == 1
        elif owners.division is Division.MATRICES:
            assert (owners.bounds[0], owners.bounds[-1]) == (0, work.matrices)
            runs = [owners.matrices(rank) for rank in owners.ranks]
            assert all(first < last for first, last in runs)
            assert [first for first, _ in runs] == list(owners.bounds[:-1])
            assert {owners.matrices(rank) for rank in set(range(ranks)) - set(owners.ranks)} <= {(0, 0)}
        else:
            size = len(owners.ranks)
            assert 1 < size <= work.most_peers
            assert ranks % size == owners.ranks[0] % size == 0
            assert owners.ranks == tuple(range(owners.ranks[0], owners.ranks[0] + size))
    assert sum(plan.numels) == pytest.approx(sum(work.numel for work in works))
    assert sum(plan.state_bytes) == pytest.approx(sum(work.state_bytes for work in works))
    assert plan.step_seconds <= plan_owners(works, ranks, model=model).step_seconds * (1 + 1e-9)


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


@pytest.mark.parametrize("policy", [OwnerPolicy.BUCKET, OwnerPolicy.GLOBAL])
def test_works_level_what_ranks_step_besides(policy):
    """The rank that has 18 gets nothing more until the others have as much."""
    plan = plan_owners(uniform(6), 3, policy=policy, carried=Carried((18.0, 0.0, 0.0), (1536.0, 0.0, 0.0)))
    assert plan.costs == (0.0, 18.0, 18.0)
    assert plan.state_bytes == (0.0, 1536.0, 1536.0)


def test_what_is_carried_by_other_ranks_is_refused():
    """One load for each of two ranks, and three ranks."""
    with pytest.raises(
        ShardingError, match=r"carried has 2 costs and 2 state_bytes; there is one of each for 3"
    ):
        plan_owners(uniform(1), 3, carried=Carried((0.0, 0.0), (0.0, 0.0)))


def test_no_rank_holds_much_more_state_than_the_others():
    """Cheap works with much state would otherwise all go to one rank."""
    heavy = [Work(f"h{index}", 100.0, 10, 80) for index in range(4)]
    light = [Work(f"l{index}", 1.0, 100, 800) for index in range(40)]
    plan = plan_owners([*heavy[:1], *light], 4)
    assert plan.memory_imbalance <= 1.1


def test_exchanges_find_what_the_largest_first_misses():
    """3, 3 | 2, 2, 2 is equal; the largest first gives 3, 2, 2 | 3, 2."""
    works = [Work(f"w{index}", cost, 1, 8) for index, cost in enumerate((3.0, 3.0, 2.0, 2.0, 2.0))]
    plan = plan_owners(works, 2)
    assert plan.costs == (6.0, 6.0)


def test_a_batch_is_divided_where_whole_ones_would_not_balance():
    """Two batches of 6 on 4 ranks: 3 matrices each; where batches balance, they stay whole."""
    batches = [Work(name, 60.0, 600, 4800, matrices=6) for name in "ab"]
    plan = plan_owners(batches, 4, divisions=[Division.WHOLE, Division.MATRICES])
    assert plan.costs == (30.0, 30.0, 30.0, 30.0)
    assert {owners.division for owners in plan.owners.values()} == {Division.MATRICES}
    assert plan_owners(batches, 4).costs == (60.0, 60.0, 0.0, 0.0)
    whole = plan_owners(batches, 2, divisions=[Division.WHOLE, Division.MATRICES])
    assert whole.counts() == {Division.WHOLE: 2, Division.PEERS: 0, Division.MATRICES: 0}


@pytest.mark.parametrize(("speed", "division"), [(1e9, Division.PEERS), (1.0, Division.WHOLE)])
def test_peers_step_together_where_that_is_faster_with_the_exchange(speed, division):
    """One matrix on two ranks: half of the work that divides, all of the rest, and 100 bytes to add up."""
    work = Work("w", 1000.0, 10, 80, most_peers=8, repeated=0.25, exchanged=100.0)
    model = CostModel(operations_per_second=100.0, node_bytes_per_second=speed, latency=0.001, rounds=5)
    plan = plan_owners([work], 2, divisions=[Division.WHOLE, Division.PEERS], model=model)
    assert plan.owners["w"].division is division
    if division is Division.PEERS:
        assert plan.costs == (625.0, 625.0)
        assert plan.numels == (5.0, 5.0)
        assert plan.seconds == pytest.approx([6.25 + 0.01] * 2)
    else:
        assert plan.costs == (1000.0, 0.0)
        assert plan.step_seconds == 10.0 < 6.25 + 0.01 + 100.0


def test_exchanges_between_nodes_are_slower():
    """Blocks that fit into a node use its network."""
    model = CostModel(node_ranks=4, node_bytes_per_second=100.0, bytes_per_second=10.0, latency=0.0)
    assert model.exchange_seconds(100.0, 1) == 0.0
    assert model.exchange_seconds(100.0, 4) == pytest.approx(1.5)
    assert model.exchange_seconds(100.0, 8) == pytest.approx(17.5)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(1, [1]), (2, [1, 2]), (12, [1, 2, 4, 12]), (13, [1, 13]), (97, [1]), (512, [1, 2, 4, 8, 16, 32, 64])],
)
def test_blocks_divide_the_ranks_and_each_other(ranks, sizes):
    """So that smaller blocks lie inside larger ones."""
    assert block_sizes(ranks) == sizes


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
