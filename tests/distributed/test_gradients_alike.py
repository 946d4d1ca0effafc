"""Before every step ranks find out whether the same parameters have gradients; one rank's None stops all."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import FP32Optimizer, OptimizerConfig, ProcessGroupCollection, build_optimizer
from megaopt_core.errors import MegaoptError, RankMismatchError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

SETTINGS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "unclipped": {"clip_grad": 0.0},
    "distributed": {"sharding": "distributed"},
    "layer_wise": {"optimizer": "muon", "sharding": "layer_wise"},
    "by hand": None,
}


def made(setting: str) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer, made alike on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    options = SETTINGS[setting]
    if options is None:
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, FP32Optimizer(inner, OptimizerConfig(lr=0.1))
    if options.get("bf16"):
        model = model.to(torch.bfloat16)
    options = {"optimizer": "adam", "lr": 0.1, **options}
    return model, build_optimizer(model, options.pop("optimizer"), **options)


def backward(model: nn.Module) -> None:
    """Compute the same gradients on all ranks."""
    x = torch.arange(12.0).view(2, 6).to(next(model.parameters()).dtype)
    model(x).square().sum().backward()


def stepped(optimizer: Any) -> str | None:
    """Step; return what is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    except MegaoptError as error:
        return f"{type(error).__name__}: {error}"
    return None


def none_of_one(model: nn.Module, optimizer: Any) -> None:
    """Have no gradient of one parameter."""
    model[1].weight.grad = None


def none_of_all(model: nn.Module, optimizer: Any) -> None:
    """Clear all gradients after the backward pass."""
    optimizer.zero_grad()


def one_alone(model: nn.Module, optimizer: Any) -> None:
    """Have a gradient of what no other rank has one of."""
    for param in (*model[0].parameters(), *model[1].parameters()):
        param.grad = None


FAULTS = {each.__name__: each for each in (none_of_one, none_of_all, one_alone)}


def faults_of_one(rank: int, size: int, setting: str) -> Any:
    """Return for each fault of the last rank what the next two steps raise, and whether anything moved."""
    answers = {}
    for name, fault in FAULTS.items():
        model, optimizer = made(setting)
        backward(model)
        first = stepped(optimizer)
        optimizer.zero_grad()
        backward(model)
        if rank == size - 1:
            fault(model, optimizer)
        kept = [param.detach().clone() for param in model.parameters()]
        raised = [stepped(optimizer) for _ in range(2)]
        still = all(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))
        optimizer.zero_grad()
        backward(model)
        answers[name] = (first, raised, still, stepped(optimizer))
    return answers


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_gradient_that_one_rank_lacks_stops_all(setting):
    """The error names it, on all ranks and until it is mended; nothing moves; then all go on."""
    ranks = launch(faults_of_one, 2, setting)
    assert ranks[0] == ranks[1]
    for name, (first, raised, still, after) in ranks[0].items():
        assert first is None, name
        assert still, name
        assert after is None, name
        for message in raised:
            assert message.startswith(RankMismatchError.__name__), name
            assert "\n  gradient of parameter " in message
            assert "on rank 0; None on rank 1" in message


def left_out(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Clear on the first rank alone."""
    if rank == 0:
        optimizer.zero_grad()
    backward(model)


def a_part_is_unused(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Leave on one rank what was left from before of what this step does not use."""
    if rank == 0 or not step:
        optimizer.zero_grad()
    model[0](torch.ones(1, 6)).sum().backward()
    if not step:
        backward(model)


def other_means(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Clear by the model's method on one rank."""
    (optimizer if rank else model).zero_grad()
    backward(model)


def more_often(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Clear twice on one rank."""
    for _ in range(1 + rank):
        optimizer.zero_grad()
    backward(model)


def reduced_by_hand(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Add up what one rank has not cleared: all have the same."""
    left_out(model, optimizer, rank, step)
    for param in model.parameters():
        dist.all_reduce(param.grad)


def clears_on_some(rank: int, size: int, how: Any) -> Any:
    """Return what steps raise."""
    model, optimizer = made("fp32")
    answers = []
    for step in range(3):
        how(model, optimizer, rank, step)
        answers.append(stepped(optimizer))
    return answers


@pytest.mark.parametrize("how", [left_out, a_part_is_unused])
def test_gradients_that_one_rank_has_not_cleared_are_found(how):
    """They are others than those of ranks that have."""
    one, other = launch(clears_on_some, 2, how)
    assert one == other
    assert one[0] is None
    assert "gradient of parameter '0.weight': norm " in one[1] or "gradient of parameter '1.weight'" in one[1]


@pytest.mark.parametrize("how", [other_means, more_often, reduced_by_hand])
def test_clearing_otherwise_is_no_fault(how):
    """Where gradients are the same, steps are."""
    assert launch(clears_on_some, 2, how) == [[None] * 3] * 2


def unused_everywhere(rank: int, size: int) -> Any:
    """Use a part of the model, freeze another whose gradient one rank keeps; return what steps raise."""
    model, optimizer = made("fp32")
    answers = []
    for _ in range(2):
        optimizer.zero_grad()
        model[0](torch.ones(1, 6)).sum().backward()
        model[2].weight.requires_grad_(False)
        model[2].weight.grad = torch.ones(4, 8) if rank else None
        answers.append(stepped(optimizer))
    return answers


def test_what_no_rank_uses_and_what_is_frozen_passes():
    """They are not stepped anywhere."""
    assert launch(unused_everywhere, 2) == [[None] * 2] * 2


def of_experts(rank: int, size: int) -> Any:
    """Have gradients of an expert on one rank alone: no token came to it elsewhere."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for param in model[1].parameters():
        param.allreduce = False
    optimizer = build_optimizer(model, "adam", lr=0.1)
    for param in model[0].parameters() if rank else model.parameters():
        param.grad = torch.ones_like(param)
    return stepped(optimizer)


def test_experts_are_left_out():
    """Their tokens are other ranks' business."""
    assert launch(of_experts, 2) == [None, None]


def in_torchs_wrapper(rank: int, size: int) -> Any:
    """Use a layer on one rank alone; return what steps raise, and a value."""
    torch.manual_seed(0)
    bare = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = bare

        def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
            return self.layers[0](x) + (self.layers[1](x) if both else 0.0)

    model = nn.parallel.DistributedDataParallel(Some(), find_unused_parameters=True)
    optimizer = build_optimizer(model, "adam", lr=0.1)
    answers = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4), both=bool(rank)).sum().backward()
        if rank and step == 2:  # whose business is the wrapper's
            bare[1].weight.grad = None
        answers.append(stepped(optimizer))
    return answers


def test_torchs_wrapper_is_left_out():
    """It gives all ranks a gradient, or none."""
    assert launch(in_torchs_wrapper, 2) == [[None] * 3] * 2


def sharded(rank: int, size: int, replicas: int) -> Any:
    """Have no gradient of one parameter on the last rank, of a model that FSDP2 shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    names = ("dp_replicate", "dp")
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=names)
    mesh = mesh if replicas > 1 else mesh["dp"]
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, "adam", lr=0.1, pg_collection=mesh)
    answers = []
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        if rank == size - 1 and step:
            model[0].weight.grad = None
        answers.append(stepped(optimizer))
    return answers


def test_copies_of_shards_have_gradients_alike():
    """HSDP: each shard has a copy; FSDP alone has none, and answers for itself."""
    pytest.importorskip("megaopt_fsdp")
    assert launch(sharded, 2, 1) == [[None, None]] * 2
    ranks = launch(sharded, 4, 2)
    assert all(answers == ranks[0] for answers in ranks)
    assert ranks[0][0] is None
    assert "gradient of parameter '0.weight': 'there is one' on rank 1; None on rank 3" in ranks[0][1]


def collectives(rank: int, size: int) -> Any:
    """Return how many reductions and gathers each of four steps makes."""
    from torch.distributed import distributed_c10d as c10d

    model, optimizer = made("fp32")
    counts, real = [], {name: getattr(c10d, name) for name in ("all_reduce", "all_gather_object")}
    count = dict.fromkeys(real, 0)

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, counted(name))
    for _ in range(4):
        count.update(dict.fromkeys(real, 0))
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        counts.append(tuple(count.values()))
    return counts


def test_it_costs_no_collective():
    """One gather in the first step, one reduction in each: those that were there."""
    assert launch(collectives, 2) == [[(1, 1), (1, 0), (1, 0), (1, 0)]] * 2


def without_any(rank: int, size: int, how: str) -> Any:
    """Step where some ranks, or none, have gradients; return how often a step said that there is none, and a report."""
    world = dist.group.WORLD
    pgs = ProcessGroupCollection(pp=world, mp=world) if "stage" in how else ProcessGroupCollection(dp=world)
    torch.manual_seed(0)
    model = nn.ModuleDict({f"layer{rank if 'stage' in how else ''}": nn.Linear(3, 3)})
    if how == "an expert of one rank":
        model["expert"] = nn.Linear(3, 3)
        for param in model["expert"].parameters():
            param.allreduce = False
    optimizer = build_optimizer(model, "adam", lr=0.1, pg_collection=pgs)
    if how in ("one stage", "an expert of one rank") and rank:
        list(model.values())[-1].weight.grad = torch.ones(3, 3)
    said = 0
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += sum("no parameter has a gradient" in str(each.message) for each in caught)
    return said, "no parameter had a gradient" in str(optimizer.report(after_step=True))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("replicas", [(1, True), (1, True)]),
        ("no stage", [(1, True), (1, True)]),
        ("one stage", [(0, True), (0, False)]),
        ("an expert of one rank", [(0, True), (0, True)]),
    ],
)
def test_a_step_without_any_gradient_is_warned_of_where_no_rank_has_one(how, expected):
    """Another replica's expert or another stage is enough; a report is about the optimizers of its own rank."""
    assert launch(without_any, 2, how) == expected
