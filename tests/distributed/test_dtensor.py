"""Models that torch's tensor parallelism has cut into DTensors train as they do whole, in one process."""

import math
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from dtensor_models import WIDTH, batch, build, cut_model, installed, mesh_of, train, whole, whole_model
from long_runs import sometimes
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megaopt_core import FP32Optimizer, OptimizerConfig, ProcessGroupCollection, build_optimizer
from megaopt_core.errors import ConfigurationError, RoutingError, ShardingError
from megaopt_core.optimizers import MegatronOptimizer

pytest.importorskip("megaopt_adam")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def require_close(model: nn.Module, reference: nn.Module) -> None:
    """Raise unless the parameters of a cut model are those of a whole one."""
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).detach()
        torch.testing.assert_close(whole(param), expected, rtol=0, atol=1e-5, msg=name)


def equal_runs(rank: int, size: int, kinds: list[str], dims: dict[str, int]) -> None:
    """Train whole models here, cut ones with the others, and compare."""
    mesh = mesh_of(**dims)
    for kind in kinds:
        equal_run(kind, mesh, dims)


def equal_run(kind: str, mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """Train one model whole and cut."""
    replicas = dims.get("dp", 1)
    reference = whole_model()
    expected = train(reference, build(reference, kind, ProcessGroupCollection()), range(4), replicas)
    model = cut_model(mesh["tp"])
    optimizer = build(model, kind, mesh)
    norms = train(model, optimizer, range(4), mesh=mesh)
    assert min(expected) > 1.0  # clipped
    assert norms == pytest.approx(expected, rel=1e-6)
    require_close(model, reference)


@pytest.mark.parametrize(
    "dims", sometimes([{"tp": 2}, {"dp": 2, "tp": 2}], [{"dp": 2, "tp": 2}]), ids="x".join
)
def test_a_cut_model_trains_as_the_whole_one(launch, dims) -> None:
    """Parameters and norms are those of one process, clipping included, for every optimizer that is installed."""
    launch(equal_runs, math.prod(dims.values()), installed(), dims)


def accumulate(model: nn.Module, optimizer: MegatronOptimizer) -> list[float | None]:
    """Step on two backward passes at a time, with gradients that are kept and filled with zeros; return the norms."""
    norms = []
    for step in range(0, 6, 2):
        optimizer.zero_grad(set_to_none=False)
        for part in (step, step + 1):
            model(batch(part)).square().sum().backward()
        norms.append(optimizer.step().grad_norm)
    return norms


def accumulated_runs(rank: int, size: int) -> None:
    """Compare runs of the whole and of the cut model."""
    mesh = mesh_of(tp=size)
    reference, model = whole_model(), cut_model(mesh)
    expected = accumulate(reference, build(reference, "adam", ProcessGroupCollection()))
    optimizer = build(model, "adam", mesh)
    assert accumulate(model, optimizer) == pytest.approx(expected, rel=1e-6)
    require_close(model, reference)
    assert "blocks.0.up.weight" in str(optimizer.report(after_step=True, full=True))


def test_gradients_may_be_kept_and_added_up(launch) -> None:
    """Two backward passes a step, in gradients that `zero_grad` fills with zeros."""
    launch(accumulated_runs, 2)


def step_bf16(rank: int, size: int) -> None:
    """Step a bf16 model on given gradients, whole and cut."""
    mesh = mesh_of(tp=size)
    reference, model = whole_model().bfloat16(), cut_model(mesh).bfloat16()
    expected = build(reference, "adam", ProcessGroupCollection(), bf16=True)
    optimizer = build(model, "adam", mesh, bf16=True)
    for step in range(3):
        for name, param in model.named_parameters():
            torch.manual_seed(step)
            grad = torch.randn(param.shape).bfloat16()
            reference.get_parameter(name).grad = grad
            cut = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, mesh, param.placements) if cut else grad.clone()
        assert optimizer.step().grad_norm == pytest.approx(expected.step().grad_norm, rel=1e-6)
    require_close(model, reference)
    for name, param in model.named_parameters():
        main = expected.state[reference.get_parameter(name)]["main_param"]
        mine = optimizer.state[param]["main_param"]
        if isinstance(param, DTensor):
            main = distribute_tensor(main.detach(), mesh, param.placements).to_local()
        torch.testing.assert_close(mine.detach(), main.detach(), rtol=0, atol=1e-5, msg=name)


def test_low_precision_models_have_main_parameters_of_what_each_rank_holds(launch) -> None:
    """The fp32 copies are cut as the model is."""
    launch(step_bf16, 2)


class Attention(nn.Module):
    """Attention with one weight for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixed values."""
        query, key, value = self.qkv(x).split(WIDTH, -1)
        return self.out(torch.softmax(query @ key.transpose(1, 2), -1) @ value)


def fused_runs(rank: int, size: int) -> None:
    """Train attention whole, and with its fused weight cut by rows."""
    mesh = mesh_of(tp=size)
    torch.manual_seed(0)
    reference, model = (nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention()) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    parallelize_module(model, mesh, {"1.qkv": ColwiseParallel(output_layouts=Replicate())})
    kind = "muon distributed"
    example = torch.zeros(2, 3, WIDTH)
    expected = train(reference, build(reference, kind, ProcessGroupCollection(), example=example), range(3))
    optimizer = build(model, kind, mesh, example=example)
    assert optimizer.routing.params["1.qkv.weight"].decision.view.split_sizes == (WIDTH,) * 3
    assert train(model, optimizer, range(3)) == pytest.approx(expected, rel=1e-6)
    require_close(model, reference)


def test_a_cut_may_go_through_the_pieces_of_a_fused_weight(launch) -> None:
    """Queries, keys and values are orthogonalized one by one, though each rank holds one and a half of them."""
    pytest.importorskip("megaopt_muon")
    launch(fused_runs, 2)


class Holder(nn.Module):
    """One parameter that is a DTensor."""

    def __init__(self, mesh: DeviceMesh, placement: Placement, shape: tuple[int, ...] = (7, 4)) -> None:
        super().__init__()
        value = torch.arange(math.prod(shape)).reshape(shape).float() / 10
        if isinstance(placement, Partial):
            tensor = DTensor.from_local(value, mesh, [placement])
        else:
            tensor = distribute_tensor(value, mesh, [placement])
        self.weight = nn.Parameter(tensor)


def step_uneven(rank: int, size: int) -> None:
    """Step rows that three ranks hold unevenly, the last none."""
    mesh = mesh_of(tp=size)
    cut, plain = Holder(mesh, Shard(0), (4, 4)), nn.Module()
    plain.weight = nn.Parameter(whole(cut.weight))
    cut.weight.grad = (cut.weight * 2).detach()
    plain.weight.grad = (plain.weight * 2).detach()
    optimizer = build(cut, "adam", mesh)
    expected = build(plain, "adam", ProcessGroupCollection()).step()
    assert optimizer.step().grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    torch.testing.assert_close(whole(cut.weight), plain.weight.detach())


def test_ranks_may_hold_unequal_parts(launch) -> None:
    """Of four rows two ranks hold two each, the third holds none."""
    launch(step_uneven, 3)


def refusals(rank: int, size: int) -> list[str]:
    """Build what cannot be stepped, and return what each attempt raises."""
    mesh = mesh_of(tp=size)
    attempts = [
        (Holder(mesh, Partial()), "adam", mesh, RoutingError),
        (Holder(mesh, Shard(0)), "adam", {"dp": dist.group.WORLD}, ShardingError),
    ]
    if find_spec("megaopt_muon"):
        uneven = Holder(mesh, Shard(0))
        uneven.weight.use_muon = True
        attempts.append((uneven, "muon", mesh, ShardingError))
    messages = []
    with pytest.raises(ConfigurationError, match=r"'group0\.param0' of shape \(7, 4\) is a DTensor"):
        FP32Optimizer(torch.optim.SGD(Holder(mesh, Shard(0)).parameters()), OptimizerConfig())
    with pytest.raises(ShardingError, match=r"'weight' is a DTensor \(1 parameters are\)"):
        DistributedDataParallel(Holder(mesh, Shard(0)), DistributedDataParallelConfig(), mesh)
    for model, name, groups, error in attempts:
        with pytest.raises(error) as raised:
            build_optimizer(model, name, pg_collection=groups, sharding="replicated")
        messages.append(str(raised.value))
    return messages


def test_what_cannot_be_stepped_is_refused_on_every_rank(launch) -> None:
    """The error names the parameter and its placement."""
    expected = [
        "'weight' is a DTensor with the placement Partial(sum) over the 2 ranks of 'tp'; allowed are Shard",
        "'weight': it is a DTensor that is cut along dimension 0 over the 2 ranks of 'dp', which are not",
        "'weight': 'muon' steps whole matrices, but dimension 0 of its shape (7, 4) is unevenly cut over 2 ranks",
    ]
    for messages in launch(refusals, 2):
        for message, part in zip(messages, expected, strict=False):
            assert part in message
