"""Norms, counts and skipped steps over ranks: every gradient counts once, and all ranks agree."""

import math
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaopt_core import (
    ChainedOptimizer,
    DynamicGradScaler,
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParamKey,
    ProcessGroupCollection,
    build_optimizer,
)

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def full_grad(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the gradient of a whole parameter, the same on every rank, with some zeros in it."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) > 0.1)


def norm_of(*grads: torch.Tensor) -> float:
    """Return the norm in float64."""
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


def zeros_in(*grads: torch.Tensor) -> int:
    """Return how many elements are zero."""
    return sum(int((grad == 0).sum()) for grad in grads)


class Part(nn.Module):
    """One rank's part of a model."""

    def __init__(self, **grads: torch.Tensor) -> None:
        super().__init__()
        for name, grad in grads.items():
            param = nn.Parameter(torch.ones(grad.shape, dtype=grad.dtype))
            param.grad = grad.clone()
            self.register_parameter(name, param)


def measured(
    module: nn.Module, pgs: ProcessGroupCollection | DeviceMesh | None
) -> tuple[float | None, int | None, Mapping[str | None, float]]:
    """Step once and return norm, zeros and the norms of all groups."""
    settings = {"lr": 0.0, "clip_grad": 1e9, "log_num_zeros_in_grad": True}
    optimizer = build_optimizer(module, "sgd", overrides={}, pg_collection=pgs, **settings)
    result = optimizer.step()
    return result.grad_norm, result.num_zeros_in_grad, optimizer.grad_norms


# Pipeline parallelism: every rank has layers of its own, and the first and the last share an embedding.


def pipeline(rank: int, size: int) -> tuple:
    """Step a stage."""
    grads = {f"layer{rank}": full_grad(f"layer{rank}", (70, 30)), "tied": full_grad("tied", (20, 5))}
    if rank not in (0, size - 1):
        del grads["tied"]
    module = Part(**grads)
    if rank == size - 1:
        module.tied.shared = True
    world = dist.group.WORLD
    settings = {"lr": 0.0, "clip_grad": 1e9, "log_num_zeros_in_grad": True}
    pgs = ProcessGroupCollection(pp=world, mp=world)
    name = {"tied": "tied"}
    optimizer = build_optimizer(
        module,
        "sgd",
        overrides={},
        pg_collection=pgs,
        fqn=lambda _, local: name.get(local, local),
        **settings,
    )
    result = optimizer.step()
    return result.grad_norm, result.num_zeros_in_grad


@pytest.mark.parametrize("size", sometimes([2, 4], [4]))
def test_pipeline_stages_add_up_and_shared_parameters_count_once(launch, size) -> None:
    """The norm is that of the whole model in one process; the embedding of the last stage is not counted again."""
    grads = [full_grad(f"layer{rank}", (70, 30)) for rank in range(size)] + [full_grad("tied", (20, 5))]
    for norm, zeros in launch(pipeline, size):
        assert norm == pytest.approx(norm_of(*grads), rel=1e-6)
        assert zeros == zeros_in(*grads)


# Tensor parallelism: one weight is cut, the other parameter is the same on every rank.


def tensor_parallel(rank: int, size: int, groups: tuple[str, ...]) -> tuple:
    """Step one part of a cut model."""
    cut, same = full_grad("cut", (40, 12)), full_grad("same", (12,))
    module = Part(cut=cut.chunk(size)[rank], same=same)
    module.cut.tensor_model_parallel = True
    module.cut.partition_dim = 0
    return measured(module, dict.fromkeys(groups, dist.group.WORLD))


@pytest.mark.parametrize("groups", [("tp",), ("tp", "mp")])
@pytest.mark.parametrize("size", sometimes([2, 4], [4]))
def test_tensor_parallel_duplicates_count_once(launch, size, groups) -> None:
    """What every rank holds is counted by the first of them; norms add up over `tp`, where no `mp` is given too."""
    grads = full_grad("cut", (40, 12)), full_grad("same", (12,))
    for norm, zeros, _ in launch(tensor_parallel, size, groups):
        assert norm == pytest.approx(norm_of(*grads), rel=1e-6)
        assert zeros == zeros_in(*grads)


# Both at once, from a DeviceMesh.


def mesh_of(**dims: int) -> DeviceMesh:
    """Return a mesh with named dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def pipeline_and_tensor(rank: int, size: int) -> tuple:
    """Step one half of one stage."""
    mesh = mesh_of(pp=2, tp=2)
    stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    module = Part(
        **{
            f"cut{stage}": full_grad(f"cut{stage}", (8, 6)).chunk(2, dim=1)[part].contiguous(),
            f"same{stage}": full_grad(f"same{stage}", (6,)),
        }
    )
    cut = getattr(module, f"cut{stage}")
    cut.tensor_model_parallel, cut.partition_dim = True, 1
    return measured(module, mesh)


def test_tensor_and_pipeline_parallelism_together(launch) -> None:
    """Four ranks, two stages of two halves."""
    grads = [full_grad(f"cut{stage}", (8, 6)) for stage in (0, 1)]
    grads += [full_grad(f"same{stage}", (6,)) for stage in (0, 1)]
    for norm, zeros, _ in launch(pipeline_and_tensor, 4):
        assert norm == pytest.approx(norm_of(*grads), rel=1e-6)
        assert zeros == zeros_in(*grads)


# Experts: each expert-parallel rank has experts of its own; dense parameters are the same everywhere.


def experts(rank: int, size: int) -> tuple:
    """Step the dense part and one expert."""
    mesh = mesh_of(dp=size // 2, ep=2)
    mine = mesh.get_local_rank("ep")
    module = Part(
        **{"dense": full_grad("dense", (9, 4)), f"expert{mine}": full_grad(f"expert{mine}", (5, 5))}
    )
    getattr(module, f"expert{mine}").allreduce = False
    return measured(module, mesh)


@pytest.mark.parametrize("size", sometimes([2, 4], [4]))
def test_experts_add_up_over_expert_parallel_ranks(launch, size) -> None:
    """Dense parameters are counted once, each expert once, whatever the number of replicas."""
    grads = [full_grad("dense", (9, 4)), full_grad("expert0", (5, 5)), full_grad("expert1", (5, 5))]
    for norm, zeros, _ in launch(experts, size):
        assert norm == pytest.approx(norm_of(*grads), rel=1e-6)
        assert zeros == zeros_in(*grads)


# A norm of its own, of parameters that one rank has.


def norm_groups(rank: int, size: int, by_hand: bool) -> tuple:
    """Step two stages, the second with a norm of its own."""
    module = Part(**{f"layer{rank}": full_grad(f"layer{rank}", (6, 6))})
    if rank == 1:
        module.layer1.grad_norm_group = "second"
    pgs = ProcessGroupCollection(pp=dist.group.WORLD, mp=dist.group.WORLD)
    if not by_hand:
        return measured(module, pgs)
    inner = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer = FP32Optimizer(inner, OptimizerConfig(clip_grad=1e9), process_groups=pgs)
    return optimizer.step().grad_norm, 0, optimizer.grad_norms


@pytest.mark.parametrize("by_hand", [False, True])
def test_every_rank_knows_every_norm(launch, by_hand) -> None:
    """A norm group that one rank has is reduced by all."""
    main, other = (norm_of(full_grad(f"layer{rank}", (6, 6))) for rank in (0, 1))
    for norm, _, norms in launch(norm_groups, 2, by_hand):
        assert norm == pytest.approx(main, rel=1e-6)
        assert norms == pytest.approx({None: main, "second": other}, rel=1e-6)


# Overflow on one rank.


def overflow(rank: int, size: int, group: str, precision: str) -> tuple:
    """Step, then step with an infinity on rank 1, and tell what changed."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    grad = full_grad("w", (4, 4)).to(dtype)
    module = Part(a=grad, b=grad)
    world = dist.group.WORLD
    pgs = ProcessGroupCollection(pp=world, mp=world) if group == "mp" else ProcessGroupCollection(dp=world)
    settings = (
        {"fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1} if precision == "fp16" else {"bf16": True}
    )
    if precision == "aware":
        settings["use_precision_aware_optimizer"] = True
    overrides = {ParamKey(name="b"): {"optimizer": "sgd"}}
    optimizer = build_optimizer(
        module, "adam", lr=0.1, clip_grad=1.0, overrides=overrides, pg_collection=pgs, **settings
    )
    first = optimizer.step().update_successful
    before = [param.detach().clone() for param in module.parameters()]
    state = {
        name: optimizer.state[param]["exp_avg"].clone()
        for param, name in optimizer.names.items()
        if name == "a"
    }
    module.a.grad = grad.clone()
    if rank == 1:
        module.a.grad[0, 0] = float("inf")
    result = optimizer.step()
    same = all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    same = same and torch.equal(state["a"], optimizer.state[module.a]["exp_avg"])
    return (
        first,
        tuple(result),
        same,
        optimizer.state[module.a]["step"].item(),
        optimizer.get_loss_scale().item(),
    )


@pytest.mark.parametrize("group", ["mp", "dp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "aware"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(launch, group, precision) -> None:
    """Nothing changes on any rank or in any child, and scales stay equal."""
    scale = 4.0 if precision == "fp16" else 1.0
    assert launch(overflow, 2, group, precision) == [(True, (False, None, None), True, 1.0, scale)] * 2


def overflow_in_a_duplicate(rank: int, size: int) -> tuple:
    """Step with an infinity in rank 1's copy of what rank 0 counts."""
    module = Part(cut=full_grad("cut", (4, 4)).bfloat16(), same=full_grad("same", (4,)).bfloat16())
    module.cut.tensor_model_parallel, module.cut.partition_dim = True, 0
    if rank == 1:
        module.same.grad[2] = float("inf")
    before = module.same.detach().clone()
    pgs = ProcessGroupCollection(tp=dist.group.WORLD, mp=dist.group.WORLD)
    result = build_optimizer(module, "sgd", lr=0.1, bf16=True, overrides={}, pg_collection=pgs).step()
    return tuple(result), torch.equal(before, module.same)


def test_an_overflow_in_a_duplicate_skips_the_step_on_all(launch) -> None:
    """It enters no norm, and is found all the same."""
    assert launch(overflow_in_a_duplicate, 2) == [((False, None, None), True)] * 2


# Ranks without parameters.


def empty_group(rank: int, size: int) -> tuple:
    """Step a chain of which rank 0 has one optimizer only."""
    grads = {"a": full_grad("a", (5, 4))}
    if rank == 1:
        grads["b"] = full_grad("b", (5, 4))
    module = Part(**grads)
    module.a.shared = rank == 1
    world = dist.group.WORLD
    optimizer = build_optimizer(
        module,
        "adam",
        lr=0.1,
        clip_grad=1.0,
        overrides={ParamKey(name="b"): {"optimizer": "sgd", "lr": 0.5}},
        pg_collection=ProcessGroupCollection(pp=world, mp=world),
    )
    norms = []
    for _ in range(2):
        norms.append(optimizer.step().grad_norm)
        for name, grad in grads.items():
            getattr(module, name).grad = grad.clone()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return norms, sizes, [group["lr"] for group in optimizer.param_groups]


def test_a_rank_without_parameters_of_an_optimizer_joins_in(launch) -> None:
    """It holds an empty group, takes part in every reduction, and sees the same norm."""
    expected = norm_of(full_grad("a", (5, 4)), full_grad("b", (5, 4)))
    first, second = launch(empty_group, 2)
    for norms, _, rates in (first, second):
        assert norms == pytest.approx([expected, expected], rel=1e-6)
        assert rates == [0.1, 0.5]
    assert (first[1], second[1]) == ([1, 0], [1, 1])


# Chains by hand.


def chain_by_hand(rank: int, size: int) -> float | None:
    """Step a chain that was put together by hand."""
    world = dist.group.WORLD
    pgs = ProcessGroupCollection(pp=world, mp=world)
    module = Part(a=full_grad(f"a{rank}", (3, 3)).half(), b=full_grad(f"b{rank}", (3, 3)).half())
    config = OptimizerConfig(fp16=True, clip_grad=1e9)
    children = [
        MixedPrecisionOptimizer(
            torch.optim.SGD([param], lr=0.0), config, DynamicGradScaler(1.0, 1.0), process_groups=pgs
        )
        for param in module.parameters()
    ]
    return ChainedOptimizer(children).step().grad_norm


def test_chains_by_hand_have_one_norm_over_ranks(launch) -> None:
    """All children on all ranks."""
    grads = [full_grad(f"{name}{rank}", (3, 3)).half().float() for name in "ab" for rank in range(2)]
    assert launch(chain_by_hand, 2) == pytest.approx([norm_of(*grads)] * 2, rel=1e-6)


def skip_by_hand(rank: int, size: int) -> tuple[bool, bool]:
    """Step optimizers made without process groups, with an infinite gradient on rank 1."""
    module = Part(a=full_grad("a", (3, 3)).bfloat16())
    before = module.a.detach().clone()
    if rank == 1:
        module.a.grad[0, 0] = float("inf")
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([module.a], lr=1.0), OptimizerConfig(bf16=True))
    return optimizer.step().update_successful, torch.equal(before, module.a)


def test_optimizers_by_hand_skip_together(launch) -> None:
    """Without process groups they take torch's default group, as `build_optimizer` does."""
    assert launch(skip_by_hand, 2) == [(False, True), (False, True)]


# Collections.


def collections(rank: int, size: int) -> dict[str, object]:
    """Return the ranks of every group."""

    def ranks(group) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    def describe(pgs) -> dict[str, object]:
        names = ("tp", "pp", "dp", "dp_cp", "mp", "ep", "expt_dp", "tp_ep_pp")
        return {name: ranks(getattr(pgs, name)) for name in names}

    dense = mesh_of(pp=2, dp=1, tp=2)
    experts = mesh_of(dp=2, ep=2)
    default = ProcessGroupCollection.of(None)
    twice = [describe(ProcessGroupCollection.of(dense)) for _ in range(2)]
    return {
        "dense": twice[0],
        "same again": twice[0] == twice[1],
        "experts": describe(ProcessGroupCollection.of(experts)),
        "default": describe(default),
        "sizes": (default.data_parallel_size, default.expt_dp.size()),
    }


def test_collections_from_meshes_and_from_the_default_group(launch) -> None:
    """Groups by the names of dimensions; combined ones are flattened; `ep` divides data parallelism."""
    for rank, found in enumerate(launch(collections, 4)):
        stage, part = divmod(rank, 2)
        same_stage, same_part, world = [2 * stage, 2 * stage + 1], [part, part + 2], [0, 1, 2, 3]
        assert found["dense"] == {
            "tp": same_stage,
            "pp": same_part,
            "dp": [rank],
            "dp_cp": [rank],
            "mp": world,
            "ep": None,
            "expt_dp": [rank],
            "tp_ep_pp": world,
        }
        assert found["same again"] is True
        assert found["experts"] == {
            "tp": None,
            "pp": None,
            "dp": world,
            "dp_cp": world,
            "mp": None,
            "ep": same_stage,
            "expt_dp": same_part,
            "tp_ep_pp": same_stage,
        }
        assert found["default"]["dp"] == found["default"]["expt_dp"] == world
        assert found["sizes"] == (4, 4)


def bad_mesh(rank: int, size: int) -> list[str]:
    """Return what is said about meshes that cannot be read."""
    from torch.distributed.device_mesh import init_device_mesh

    messages = []
    for names in (None, ("rows",)):
        try:
            ProcessGroupCollection.of(init_device_mesh("cpu", (size,), mesh_dim_names=names))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_meshes_that_cannot_be_read_are_refused(launch) -> None:
    """Without names, or with others."""
    expected = [
        "the DeviceMesh has no dimension names; name them with mesh_dim_names=('dp', 'tp')",
        "DeviceMesh dimensions ['rows'] are not known; allowed are ['tp', 'pp', 'cp', 'dp', 'ep'], and [",
    ]
    for messages in launch(bad_mesh, 2):
        assert [told[: len(start)] for told, start in zip(messages, expected, strict=True)] == expected


def dumps(rank: int, size: int, folder: str) -> str:
    """Build with a folder for configurations."""
    build_optimizer(nn.Linear(2, 2), "adam", lr=0.1, config_logger_dir=f"{folder}/{rank}")
    return "done"


def test_one_rank_writes_the_configuration_down(launch, tmp_path) -> None:
    """Rank 0 does, for all."""
    launch(dumps, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


# Parameter objects that share their memory, under a wrapper that brings gradients back when backward is over.


class TiedByHand(nn.Module):
    """Two parameter objects of one memory, as loading by hand can make them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 2))
        self.head = nn.Parameter(self.table.data)

    def forward(self, weight: float) -> torch.Tensor:
        """Return a loss whose gradients are 1 and `weight`."""
        return self.table.sum() + weight * self.head.sum()


def twins_under_ddp(rank: int, size: int, views: bool) -> None:
    """Every rank has the mean of the sums, once torch's DDP has reduced them; also after passes without reductions."""
    model = TiedByHand()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = build_optimizer(wrapped, "sgd", lr=1.0, sgd_momentum=0.0, clip_grad=0.0, weight_decay=0.0)
    expected = model.table.detach().clone()
    for _ in range(2):
        with wrapped.no_sync():
            wrapped(rank + 1.0).backward()
        wrapped(rank + 1.0).backward()
        assert model.table.grad.unique().tolist() == [5.0]
        assert model.head.grad is None
        optimizer.step()
        optimizer.zero_grad()
        expected -= 5.0
        assert torch.equal(model.table, expected)


@pytest.mark.parametrize("views", [False, True])
def test_twins_under_torchs_ddp(launch, views) -> None:
    """Both gradients are reduced before they are added up."""
    launch(twins_under_ddp, 2, views)
