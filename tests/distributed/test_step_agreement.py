"""Before every step ranks find out whether they are about to step alike; what one did alone raises on all."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import launch
from torch import nn
from torch.distributed.algorithms.join import Join

from megaopt_core import FP32Optimizer, OptimizerConfig, OptimizerParamScheduler, build_optimizer
from megaopt_core.errors import MegaoptError, OwnershipError, RankMismatchError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


class Net(nn.Module):
    """A frozen layer, two that train, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def schedule(optimizer: Any, **changed: Any) -> Any:
    """Return a scheduler of `optimizer`."""
    values = {
        "init_lr": 0.0,
        "max_lr": 0.1,
        "min_lr": 0.01,
        "lr_warmup_steps": 2,
        "lr_decay_steps": 50,
        "lr_decay_style": "linear",
        "start_wd": 0.0,
        "end_wd": 0.0,
        "wd_incr_steps": 1,
        "wd_incr_style": "constant",
    }
    return OptimizerParamScheduler(optimizer, **{**values, **changed})


def made(setting: str, *, changed: Any = None) -> Any:
    """Return model, optimizer and scheduler."""
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16 if setting == "bf16" else torch.float32)
    options = {"bf16": {"bf16": True}, "distributed": {"sharding": "distributed"}}.get(setting, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = build_optimizer(model, "adam", lr=0.1, **options)
    return model, optimizer, schedule(optimizer, **(changed or {}))


def stepped(model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
    """Step with the same gradients on all ranks; return class and message of what it raises."""
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = grad if param.requires_grad else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        scheduler.step(1)
    except MegaoptError as error:
        return type(error).__name__, str(error)
    return None


def unfreezes(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Let a layer train that was frozen."""
    model.base.weight.requires_grad_(True)


def freezes(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Freeze a layer that trained."""
    model.head.bias.requires_grad_(False)


def adds(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Add a layer."""
    model.extra = nn.Linear(2, 2, bias=False)


def writes_lr(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Write another learning rate, as a scheduler of torch's does."""
    optimizer.param_groups[0]["max_lr"] = optimizer.param_groups[0]["lr"] = 0.07


def replaces(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Put other parameters in the place of those that trained, as `load_state_dict(assign=True)` does."""
    values = {name: value + 1.0 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    model.base.requires_grad_(False)


def loads(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Write values that no other rank has."""
    with torch.no_grad():
        model.body.weight.add_(1.0)


def goes_ahead(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Count steps that were not made."""
    scheduler.step(7)


def breaks_lr(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Write a learning rate that cannot be."""
    optimizer.param_groups[0]["weight_decay"] = -1.0


def nothing(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Change nothing."""


HABITS = {
    each.__name__: each
    for each in (unfreezes, freezes, adds, writes_lr, replaces, loads, goes_ahead, breaks_lr, nothing)
}
SAID = {
    "unfreezes": "the parameters that are stepped: parameter 'base.weight' is on rank 1, not on rank 0",
    "freezes": "parameter 'head.bias': trains on rank 0; was frozen after the build on rank 1",
    "adds": "the parameters that are stepped: parameter 'extra.weight' is on rank 1, not on rank 0",
    "writes_lr": "lr: 0.1 on rank 0; 0.07 on rank 1",
    "loads": "parameter 'body.weight': norm ",
    "replaces": "parameter 'body.weight': norm ",
    "goes_ahead": "the scheduler num_steps: 2 on rank 0; 9 on rank 1",
    "breaks_lr": "weight_decay=-1.0",
    "nothing": "",
}


def habits_of_one(rank: int, size: int, setting: str, names: list[str]) -> Any:
    """Return for each habit of the last rank what the next steps raise, whether anything moved, and `check()`."""
    answers = []
    for name in names:
        model, optimizer, scheduler = made(setting)
        first = [stepped(model, optimizer, scheduler) for _ in range(2)]
        if rank == size - 1:
            HABITS[name](model, optimizer, scheduler)
        kept = [param.detach().clone() for param in model.parameters()]
        raised = [stepped(model, optimizer, scheduler) for _ in range(2)]
        still = all(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))
        answers.append((first, raised, still, optimizer.check()))
    return answers


@pytest.mark.parametrize("setting", ["fp32", "bf16"])
def test_what_one_rank_did_alone_raises_on_all_before_the_step(setting):
    """The error names it, on both ranks and until it is undone; nothing moves; `check()` says it too."""
    ranks = launch(habits_of_one, 2, setting, list(HABITS))
    for name, one, other in zip(HABITS, *ranks, strict=True):
        assert one[0] == other[0] == [None, None]
        if name == "nothing":
            assert one[1:] == other[1:] == ([None, None], False, ())
            continue
        if (name, setting) == ("loads", "fp32"):  # values of which there is no copy: `check()` alone finds it
            assert one[1] == other[1] == [None, None]
            assert SAID[name] in "\n".join(one[3])
            continue
        assert one[2], name
        assert other[2], name
        for mine, theirs in zip(one[1], other[1], strict=True):
            assert SAID[name] in mine[1], (name, mine)
            assert SAID[name] in theirs[1], (name, theirs)
            if name != "breaks_lr":
                assert mine == theirs
                assert mine[0] == RankMismatchError.__name__
        if name == "breaks_lr":
            assert one[1][0][0] == OwnershipError.__name__
            assert "another rank cannot step" in one[1][0][1]
            assert other[1][0][0] == "ConfigurationError"
        else:
            assert SAID[name].split(" on rank")[0] in "\n".join(one[3]), (name, one[3])


def habits_of_all(rank: int, size: int, setting: str) -> Any:
    """Do on all ranks what is honest there, and step on."""
    answers = []
    for name in ("unfreezes", "freezes", "adds", "writes_lr", "replaces", "loads", "goes_ahead"):
        model, optimizer, scheduler = made(setting)
        stepped(model, optimizer, scheduler)
        torch.manual_seed(3)
        HABITS[name](model, optimizer, scheduler)
        raised = [stepped(model, optimizer, scheduler) for _ in range(3)]
        values = [param.detach().double().sum().item() for param in model.parameters()]
        answers.append((raised, values, [line for line in optimizer.check() if "rank" in line]))
    return answers


@pytest.mark.parametrize("setting", ["fp32", "bf16"])
def test_what_all_ranks_do_passes(setting):
    """Unfreezing, freezing, adding, writing, loading everywhere is nobody's fault."""
    one, other = launch(habits_of_all, 2, setting)
    assert one == other
    for raised, _, found in one:
        assert raised == [None] * 3
        assert found == []


def other_schedule(rank: int, size: int, how: str) -> Any:
    """Make another schedule on the last rank, which gives the same learning rate at first."""
    changed = {"lr_decay_steps": 70} if rank == size - 1 and how == "other" else {}
    model, optimizer, scheduler = made("fp32", changed=changed)
    if how == "none" and rank == size - 1:
        optimizer.schedules.clear()
    return stepped(model, optimizer, scheduler)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("other", "the scheduler lr_decay_steps: 50 on rank 0; 70 on rank 1"),
        ("none", "the schedules: the scheduler is on rank 0, not on rank 1"),
        ("same", None),
    ],
)
def test_another_schedule_raises_at_the_first_step(how, said):
    """Also where the first learning rate is the same."""
    one, other = launch(other_schedule, 2, how)
    assert one == other
    assert (one is None) == (said is None)
    assert said is None or said in one[1]


def torch_schedule(rank: int, size: int) -> Any:
    """Use torch's scheduler with another period on the last rank; return the step that raised, and what."""
    torch.manual_seed(0)
    model = Net()
    optimizer = build_optimizer(model, "adam", lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 if rank else 5)
    for step in range(8):
        raised = stepped(
            model, optimizer, type("None", (), {"step": staticmethod(lambda _: scheduler.step())})
        )
        if raised:
            return step, raised
    return None


def test_another_schedule_of_torchs_raises_when_it_gives_another_rate():
    """At the very step before which ranks have other learning rates."""
    one, other = launch(torch_schedule, 2)
    assert one == other
    assert one[0] == 3
    assert "lr: " in one[1][1]


def models_of_one_kind(rank: int, size: int) -> Any:
    """Build where the last rank's model has other buffers or frozen parameters."""

    def lacks_buffer(model):
        del model.table

    def other_shape(model):
        model.table = torch.zeros(5)

    def other_dtype(model):
        model.table = model.table.double()

    def more_frozen(model):
        model.teacher = nn.Linear(2, 2).requires_grad_(False)

    def lacks_cache(model):
        del model.cache

    answers = {}
    for change in (lacks_buffer, other_shape, other_dtype, more_frozen, lacks_cache):
        model = Net()
        if rank == size - 1:
            change(model)
        try:
            optimizer = build_optimizer(model, "adam", lr=0.1)
            answers[change.__name__] = ("built", optimizer.check())
        except RankMismatchError as error:
            answers[change.__name__] = ("raised", str(error))
    return answers


def test_what_a_model_holds_is_compared_at_the_build():
    """Buffers and frozen parameters: names, shapes, dtypes; what no state dict has is left to `check()`."""
    one, other = launch(models_of_one_kind, 2)
    assert one == other
    what = "the tensors of the model that nothing steps: "
    said = {
        "lacks_buffer": f"{what}buffer 'table' is on rank 0, not on rank 1",
        "other_shape": "buffer 'table' shape: (4,) on rank 0; (5,) on rank 1",
        "other_dtype": "buffer 'table' dtype: float32 on rank 0; float64 on rank 1",
        "more_frozen": f"{what}parameter 'teacher.weight' is on rank 1, not on rank 0",
    }
    for name, words in said.items():
        assert one[name][0] == "raised", name
        assert words in one[name][1]
    how, found = one["lacks_cache"]
    assert how == "built"
    assert f"{what}buffer 'cache' is on rank 0, not on rank 1" in "\n".join(found)


def uneven(rank: int, size: int) -> Any:
    """Train with unequal numbers of batches, as torch's `Join` allows."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = build_optimizer(model, "sgd", lr=0.1)
    with Join([model]):
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    dist.barrier()
    return model.module.weight.detach().clone()


def test_uneven_inputs_pass():
    """A rank that has ended is waited for by nobody."""
    one, other = launch(uneven, 2)
    assert torch.equal(one, other)


def by_hand(rank: int, size: int) -> Any:
    """Wrap torch's optimizer by hand, and freeze or write on one rank after a step."""
    answers = []
    for change in ("freeze", "write"):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = FP32Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), OptimizerConfig(lr=0.1))
        none = type("None", (), {"step": staticmethod(lambda _: None)})
        first = stepped(model, optimizer, none)
        if rank:
            optimizer.param_groups[0]["lr"] = 0.3 if change == "write" else 0.1
            model.bias.requires_grad_(change == "write")
        answers.append((first, stepped(model, optimizer, none)))
    return answers


def test_what_is_wrapped_by_hand_is_compared_too():
    """A rate that one rank writes, and a parameter that one rank freezes."""
    one, other = launch(by_hand, 2)
    assert one == other
    assert [first for first, _ in one] == [None, None]
    assert "was frozen after the build on rank 1" in one[0][1][1]
    assert "param group 0 lr: 0.1 on rank 0; 0.3 on rank 1" in one[1][1][1]


@frozen
class Program:
    """What a rank does before some of its steps."""

    habits: tuple[tuple[int, str], ...]


PROGRAMS = st.builds(
    Program,
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(sorted(set(HABITS) - {"breaks_lr"}))),
        max_size=2,
        unique_by=lambda each: each[1],
    ).map(lambda some: tuple(sorted(some))),
)


def draw_programs(count: int) -> Any:
    """Return pairs of programs, many of them the same on both ranks."""
    drawn = []

    @settings(max_examples=count, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS, PROGRAMS, st.booleans())
    def collect(mine, theirs, alike):
        drawn.append((mine, mine if alike else theirs))

    collect()
    return drawn


def run_programs(rank: int, size: int, pairs: Any) -> Any:
    """Run this rank's program of each pair; return the step that raised, and what; and the values that came out."""
    answers = []
    for pair in pairs:
        model, optimizer, scheduler = made("bf16")
        ended = None
        for step in range(4):
            for at, name in pair[rank].habits:
                if at == step:
                    torch.manual_seed(5)
                    HABITS[name](model, optimizer, scheduler)
            raised = stepped(model, optimizer, scheduler)
            if raised:
                ended = step, raised
                break
        answers.append((ended, [param.detach().clone() for param in model.parameters()]))
    return answers


def test_ranks_that_end_a_run_have_equal_values():
    """Whatever ranks do between steps: either all raise alike, or all come out with the same bits."""
    pairs = draw_programs(40)
    one, other = launch(run_programs, 2, pairs)
    ended = 0
    for pair, mine, theirs in zip(pairs, one, other, strict=True):
        assert mine[0] == theirs[0], pair
        if pair[0] == pair[1]:
            assert mine[0] is None, pair
        if mine[0] is None:
            ended += 1
            assert len(mine[1]) == len(theirs[1]), pair
            assert all(map(torch.equal, mine[1], theirs[1])), pair
    assert 0 < ended < len(pairs)
