"""What ranks must have alike is compared when they wrap, build and first step; a difference raises on all of them."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import launch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from megaopt_core import ParamKey, ProcessGroupCollection, build_optimizer, get_registry
from megaopt_core.errors import MissingRanksError, RankMismatchError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def small(
    *,
    width: int = 4,
    swapped: bool = False,
    more: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.ModuleDict:
    """Return a model of two layers, which may be registered in another order."""
    torch.manual_seed(seed)
    layers = {"first": nn.Linear(4, width), "second": nn.Linear(width, 4)}
    if swapped:
        layers = {name: layers[name] for name in reversed(layers)}
    if more:
        layers["third"] = nn.Linear(4, 4)
    return nn.ModuleDict(layers).to(dtype)


def with_gradients(model: nn.Module) -> nn.Module:
    """Give every parameter the same gradient on all ranks."""
    for param in model.parameters():
        gradient = torch.ones_like(param)
        if hasattr(param, "main_grad"):
            param.main_grad.copy_(gradient)
        else:
            param.grad = gradient
    return model


def build(
    case: tuple[Mapping[str, Any], Mapping[str, Any], Any], *, is_other: bool, sharding: str | None = None
) -> MegatronOptimizer:
    """Build for a case: `(model arguments, settings, overrides)` of one rank, plain for the others."""
    model_args, changed, overrides = case if is_other else ({}, {}, None)
    options = {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1, "sharding": sharding, **changed}
    given_overrides = None if overrides is None else {ParamKey(name=key): value for key, value in overrides}
    return build_optimizer(small(**model_args), overrides=given_overrides, **options)


def raised_by(function: Callable[[], object]) -> tuple[str, str] | None:
    """Return class and message of what a function raises; None when it raises nothing."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return type(error).__name__, str(error)
    return None


def builds(
    rank: int, size: int, cases: Iterable[tuple[Any, ...]], sharding: str | None
) -> list[tuple[str, str] | None]:
    """Build every case with one rank that is unlike the others, the last."""
    other = rank == size - 1
    return [raised_by(lambda case=case: build(case, is_other=other, sharding=sharding)) for case in cases]


PLAIN_DECAY = [("*.bias", {"wd_mult": 0.0})]
CASES = {
    "lr": (({}, {"lr": 0.2}, None), "lr: 0.1 on {others}; 0.2 on rank {last}"),
    "weight decay": (({}, {"weight_decay": 0.3}, None), "weight_decay: 0.1 on {others}; 0.3 on rank {last}"),
    "clip": (({}, {"clip_grad": 0.5}, None), "clip_grad: 1.0 (the default) on {others}; 0.5 on rank {last}"),
    "a plugin's setting": (
        ({}, {"adam_beta2": 0.95}, None),
        "adam_beta2: 0.999 (the default) on {others}; 0.95 on rank {last}",
    ),
    "optimizer": (({}, {"optimizer": "sgd"}, None), "optimizer: 'adam' (the default) on {others}"),
    "overrides": (
        ({}, {}, [*PLAIN_DECAY, ("first.weight", {"max_lr": 0.5})]),
        "parameter 'first.weight' override: {{}} on {others}; {{'max_lr': 0.5}} on rank {last}",
    ),
    "order": (
        ({"swapped": True}, {}, None),
        "the trainable parameters: registered in another order, number 0 is parameter 'first.weight' on {others}; "
        "parameter 'second.weight' on rank {last}",
    ),
    "shape": (
        ({"width": 5}, {}, None),
        "parameter 'first.weight' shape: (4, 4) on {others}; (5, 4) on rank {last}",
    ),
    "layer": (
        ({"more": True}, {}, None),
        "the trainable parameters: parameter 'third.weight' is on rank {last}, not on {others}",
    ),
    "dtype": (
        ({"dtype": torch.float64}, {}, None),
        "parameter 'first.weight' dtype: float32 on {others}; float64 on rank {last}",
    ),
}


SIZES = {"two ranks": (2, None), "four ranks": (4, None), "sharded": (2, "distributed")}


@pytest.fixture(scope="module", params=SIZES)
def answers(request: pytest.FixtureRequest) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """What every rank raised in every case, and how the ranks are called."""
    size, sharding = SIZES[request.param]
    ranks = launch(builds, size, [case for case, _ in CASES.values()], sharding)
    others = "rank 0" if size == 2 else f"ranks 0-{size - 2}"
    return dict(zip(CASES, zip(*ranks, strict=True), strict=True)), {"others": others, "last": size - 1}


@pytest.mark.parametrize("kind", CASES)
def test_a_difference_raises_on_all_ranks_and_names_it(answers, kind):
    """Name, values and ranks, in the same words on every rank; before a strategy exchanges anything."""
    by_kind, ranks = answers
    assert {name for name, _ in by_kind[kind]} == {"RankMismatchError"}
    messages = {message for _, message in by_kind[kind]}
    assert len(messages) == 1
    message = messages.pop()
    assert CASES[kind][1].format(**ranks) in message
    assert "pg_collection" in message


def builds_with_another_version(rank: int, size: int) -> tuple[str, str] | None:
    """Build where the last rank has another version of an optimizer's plugin."""
    registry = get_registry()
    owner = registry.owner
    if rank == size - 1:
        registry.owner = lambda kind, name: evolve(owner(kind, name), version="9.9")
    return raised_by(lambda: build(({}, {}, None), is_other=True))


def test_another_version_of_a_plugin_raises_on_all_ranks():
    """It may step otherwise; who brings the optimizer, and which version, stands in the error."""
    one, other = launch(builds_with_another_version, 2)
    assert one == other
    assert one[0] == RankMismatchError.__name__
    found = re.search(r"parameter 'first.weight' plugin: (\S+) (\S+) on rank 0; (\S+) 9.9 on rank 1", one[1])
    assert found is not None, one[1]
    assert found[1] == found[3]


def wraps(
    rank: int, size: int, cases: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[tuple[str, str] | None]:
    """Wrap every case with one rank that is unlike the other."""
    common = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 400}
    answers = []
    for model_args, config in cases:
        here = (model_args, config) if rank == size - 1 else ({}, {})
        ddp_config = DistributedDataParallelConfig(**{**common, **here[1]})
        model = small(**here[0])
        answers.append(raised_by(lambda m=model, c=ddp_config: DistributedDataParallel(m, c)))
    return answers


WRAPPED = {
    "order": (({"swapped": True}, {}), "another order, number 0 is parameter 'first.weight' on rank 0"),
    "shape": (({"width": 5}, {}), "parameter 'first.weight' shape: (4, 4) on rank 0; (5, 4) on rank 1"),
    "layer": (({"more": True}, {}), "parameter 'third.weight' is on rank 1, not on rank 0"),
    "bucket size": (({}, {"bucket_size": 500}), "bucket_size: 400 on rank 0; 500 on rank 1"),
    "instances": (
        ({}, {"num_distributed_optimizer_instances": 2}),
        "num_distributed_optimizer_instances: 1 on rank 0; 2 on rank 1",
    ),
}


@pytest.fixture(scope="module")
def wrapped() -> dict[str, tuple[Any, ...]]:
    """What both ranks raised in every case of wrapping."""
    ranks = launch(wraps, 2, [case for case, _ in WRAPPED.values()])
    return dict(zip(WRAPPED, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapping_is_compared_before_a_bucket_travels(wrapped, kind):
    """Nothing of another size meets inside of a collective."""
    first, second = wrapped[kind]
    assert first == second
    assert first[0] == "RankMismatchError"
    assert WRAPPED[kind][1] in first[1]


def unlike_values(rank: int, size: int, wrapped: bool) -> tuple[Any, ...]:
    """Step from other values on one rank, then give all of them the first one's and step again."""
    model = small(seed=int(rank == size - 1))
    if wrapped:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(model, config)
    optimizer = build_optimizer(
        model, "adam", lr=0.1, clip_grad=0.0, sharding="distributed" if wrapped else None
    )
    module = with_gradients(model.module if wrapped else model)
    before = [param.detach().clone() for param in module.parameters()]
    problem = raised_by(optimizer.step)
    kept = all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    found = optimizer.check()
    with torch.no_grad():
        for param in module.parameters():
            dist.broadcast(param, 0)
    optimizer.reload_model_params()
    optimizer.step()
    return problem, kept, found, optimizer.check(), [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize(("size", "wrapped"), [(2, True), (4, False)])
def test_other_values_raise_at_the_first_step(size, wrapped):
    """They name parameter, ranks and remedy; nothing has moved, and training goes on when they are equal."""
    answers = launch(unlike_values, size, wrapped)
    problem, _, found, _, values = answers[0]
    others = "rank 0" if size == 2 else f"ranks 0-{size - 2}"
    assert problem[0] == "RankMismatchError"
    assert "broadcast_params()" in problem[1]
    assert f"parameter 'first.weight': norm {small()['first'].weight.norm().item():.6g}" in problem[1]
    assert f" on {others}; " in problem[1]
    assert f" on rank {size - 1}" in problem[1]
    assert len(found) == 4
    for other in answers:
        assert other[:3] == (problem, True, found)
        assert other[3] == ()
        assert all(map(torch.equal, other[4], values))


def drifts(rank: int, size: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Train alike, write to one rank's parameter and ask."""
    model = small()
    optimizer = build_optimizer(model, "adam", lr=0.1)
    with_gradients(model)
    optimizer.step()
    before = optimizer.check()
    if rank == 1:
        with torch.no_grad():
            model["second"].bias[2] += 1e-7
    # The first step only is compared by itself.
    with_gradients(model)
    optimizer.step()
    return before, optimizer.check(), len(optimizer.report().problems)


def test_check_compares_at_any_time():
    """One bit that differs is named; a report asks nobody."""
    for before, after, reported in launch(drifts, 2):
        assert before == ()
        assert len(after) == 1
        assert after[0].startswith("parameter 'second.bias': norm ")
        assert reported == 0


def alone(rank: int, size: int) -> tuple[str, ...] | None:
    """Build and train on one rank of two, while the other does something else."""
    answer = None
    if rank == 0:
        model = small(more=True)
        optimizer = build_optimizer(model, "adam", lr=0.1, pg_collection=ProcessGroupCollection())
        with_gradients(model)
        optimizer.step()
        answer = optimizer.check()
    dist.barrier()
    return answer


def test_a_model_on_one_rank_alone_waits_for_nobody():
    """A collection without groups compares and communicates nothing."""
    assert launch(alone, 2) == [(), None]


def each_its_own(rank: int, size: int) -> list[bool]:
    """Build another model with other settings on every rank, wrapped and bare."""
    mine = ProcessGroupCollection()
    bare = build_optimizer(small(width=4 + rank, seed=rank), "adam", lr=0.1 * (rank + 1), pg_collection=mine)
    with_gradients(nn.ParameterList(bare.get_parameters()))
    config = DistributedDataParallelConfig(bucket_size=100 * (rank + 1))
    wrapped = DistributedDataParallel(small(width=4 + rank, seed=rank), config, mine)
    other = build_optimizer(wrapped, "sgd", lr=0.1 * (rank + 1))
    with_gradients(wrapped.module)
    return [bare.step().update_successful, other.step().update_successful]


def test_a_model_for_each_rank_passes():
    """They say so with a collection without groups; the wrapper tells the optimizer."""
    assert launch(each_its_own, 4) == [[True, True]] * 4


def half_and_half(rank: int, size: int) -> float:
    """Train one model on each half of the ranks, at other times and with other settings."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    pgs = ProcessGroupCollection(dp=halves[half])
    for turn in range(2):
        if turn == half:
            model = small(width=4 + half, seed=half)
            optimizer = build_optimizer(model, "adam", lr=0.1 * (half + 1), pg_collection=pgs)
            with_gradients(model)
            optimizer.step()
        dist.barrier()
    return optimizer.param_groups[0]["lr"]


def test_models_on_parts_of_the_ranks_do_not_meet():
    """The collection says who takes part: nobody waits for the default group."""
    assert launch(half_and_half, 4) == pytest.approx([0.1, 0.1, 0.2, 0.2])


def filled_later(rank: int, size: int) -> bool:
    """Build on memory that nobody has filled, load, and step."""
    with torch.device("meta"):
        model = small()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(rank))
    optimizer = build_optimizer(model, "adam", lr=0.1)
    model.load_state_dict(small().state_dict())
    with_gradients(model)
    return optimizer.step().update_successful


def test_weights_that_are_loaded_after_the_build_pass():
    """Values are compared when they matter: at the first step."""
    assert launch(filled_later, 2) == [True, True]


def parallel_parts(rank: int, size: int) -> tuple[tuple[bool, tuple[str, ...]], tuple[str, ...]]:
    """Two pipeline stages of two tensor-parallel ranks: other layers, other shards, the same norms."""
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pipeline = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    pgs = ProcessGroupCollection(tp=tensor, pp=pipeline, mp=dist.group.WORLD)
    torch.manual_seed(rank)
    model = nn.ModuleDict({f"layer{rank // 2}": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
    weight, bias = model[f"layer{rank // 2}"].parameters()
    for param in (weight, bias):
        param.tensor_model_parallel, param.partition_dim = True, 0
    names = lambda _, name: name if name.startswith("layer") else f"stage{rank // 2}.{name}"  # noqa: E731
    optimizer = build_optimizer(model, "adam", lr=0.1, pg_collection=pgs, fqn=names)
    with_gradients(model)
    fine = optimizer.step().update_successful, optimizer.check()
    if rank == 3:
        with torch.no_grad():
            model["norm"].weight.mul_(2)
    return fine, optimizer.check()


def test_stages_and_shards_pass_and_duplicates_are_compared():
    """Layers of other stages and shards of other ranks may differ; what tensor parallelism does not cut may not."""
    answers = launch(parallel_parts, 4)
    assert [fine for fine, _ in answers] == [(True, ())] * 4
    assert len({found for _, found in answers}) == 1
    assert answers[0][1][0].startswith("parameter 'stage1.norm.weight': norm ")
    assert " on rank 2; " in answers[0][1][0]


def waits(rank: int, size: int) -> str | tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Build on rank 0 alone, with the default group."""
    if rank == 1:
        return None
    try:
        build_optimizer(small(), "adam", lr=0.1)
    except MissingRanksError as error:
        return str(error), error.came, error.missing
    return "no error"


def test_missing_ranks_are_counted_after_the_timeout():
    """The error says how many came, who is missing, and how a model on one rank alone is built."""
    (message, came, missing), _ = launch(waits, 2, group_timeout=3.0)
    assert "1 of 2 ranks came within 3 seconds; missing: rank 1" in message
    assert "pg_collection=ProcessGroupCollection()" in message
    assert (came, missing) == ((0,), (1,))


def comes_late(rank: int, size: int, folder: str) -> bool:
    """Give up once on rank 0, then meet the other."""
    gave_up = Path(folder) / "gave_up"
    if rank == 0:
        with pytest.raises(MissingRanksError):
            build_optimizer(small(), "adam", lr=0.1)
        gave_up.touch()
    while not gave_up.exists():
        time.sleep(0.05)
    build_optimizer(small(), "adam", lr=0.1)
    return True


def test_ranks_that_gave_up_can_meet_again(tmp_path):
    """The next meeting is the same one for all."""
    assert launch(comes_late, 2, str(tmp_path), group_timeout=8.0) == [True, True]


# Generated differences: four ranks, one program each, compared by what is alike in them.

MODELS = st.fixed_dictionaries(
    {}, optional={"width": st.sampled_from([4, 5]), "swapped": st.booleans(), "more": st.booleans()}
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.1, 0.1 + 1e-9]),
        "weight_decay": st.sampled_from([0.1, 0.2]),
        "clip_grad": st.sampled_from([0.0, 1.0]),
        "adam_beta1": st.sampled_from([0.9, 0.95]),
        "log_num_zeros_in_grad": st.booleans(),
    },
)
OVERRIDES = st.one_of(
    st.none(),
    st.just([]),
    st.sampled_from([[("first.*", {"max_lr": 0.5})], [("first.*", {"max_lr": 0.5, "wd_mult": 1.0})]]),
)
PROGRAMS = st.tuples(MODELS, SETTINGS, OVERRIDES, st.sampled_from([0, 0, 0, 1]))


def meaning(program: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a program is about: a setting that has its default says nothing."""
    model, changed, overrides, seed = program
    plain = {"width": 4, "swapped": False, "more": False}
    defaults = {"lr": 0.1, "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta1": 0.9}
    return (
        {**plain, **model},
        {**defaults, "log_num_zeros_in_grad": False, **changed},
        overrides,
        seed,
    )


def runs(rank: int, size: int, drawn: Iterable[Sequence[tuple[Any, ...]]]) -> list[tuple[str, str] | None]:
    """Run what every drawn case has for this rank: build, and step."""
    answers = []
    for programs in drawn:
        model, changed, overrides, seed = programs[rank]

        def run(model=model, changed=changed, overrides=overrides, seed=seed):
            optimizer = build(({**model, "seed": seed}, changed, overrides), is_other=True)
            with_gradients(nn.ParameterList(optimizer.get_parameters()))
            optimizer.step()

        answers.append(raised_by(run))
    return answers


def draw_cases(count: int) -> list[list[tuple[Any, ...]]]:
    """Return generated cases: half of the time ranks have the same program."""
    drawn = []

    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS, PROGRAMS, st.integers(0, 2))
    def collect(common, other, where):
        ranks = [common] * 2
        if where < 2:
            ranks[where] = other
        drawn.append(ranks)

    collect()
    return drawn


def test_generated_differences_are_caught_and_none_is_invented():
    """Ranks with programs of one meaning step; others raise, the same error on both."""
    drawn = draw_cases(60)
    first, second = launch(runs, 2, drawn)
    alike = 0
    for programs, one, other in zip(drawn, first, second, strict=True):
        assert one == other, programs
        is_alike = meaning(programs[0]) == meaning(programs[1])
        alike += is_alike
        assert (one is None) == is_alike, (programs, one)
        assert one is None or one[0] == RankMismatchError.__name__
    assert 0 < alike < len(drawn)
