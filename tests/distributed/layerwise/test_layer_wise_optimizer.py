"""`LayerWiseDistributedOptimizer`: made by building, or by hand from optimizers that step everything."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from layerwise_runs import PLAIN, blocks, differing, wrapped
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from megaopt_layerwise import LayerWiseDistributedOptimizer
from models import batch, loss_of, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import (
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
    get_megatron_optimizer,
)
from megaopt_core.errors import ConfigurationError, ShardingError, StateDictError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

HAND = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0)


def steps_on(
    stepper: MegatronOptimizer, model: nn.Module, wrapped: nn.Module, rank: int, count: int = 3
) -> dict[str, torch.Tensor]:
    """Train on batches of this rank's own."""
    for step in range(count):
        loss_of(wrapped, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    return values_of(model)


def by_hand(rank: int, size: int, dtype: torch.dtype, sharded: bool) -> dict[str, torch.Tensor]:
    """Wrap torch's optimizers by hand, and step them whole or narrowed."""
    model = blocks(dtype=dtype)
    wrapped = TorchDDP(model)
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    config = HAND.replace(bf16=dtype is torch.bfloat16)
    wrap = MixedPrecisionOptimizer if config.bf16 else FP32Optimizer
    children = [
        wrap(torch.optim.SGD(matrices, lr=0.1, momentum=0.9), config),
        wrap(torch.optim.Adam(rest, lr=0.01), config),
    ]
    if sharded:
        stepper = LayerWiseDistributedOptimizer(children, config)
        assert children == stepper.chained_optimizers
        assert sum(len(params) for params in stepper.dp_cp_params_list) == len(list(model.parameters()))
        kept = {param for part in stepper.parts for piece in part.pieces for param in piece.model_params}
        assert kept == set(stepper.dp_cp_params_list[rank])
    else:
        from megaopt_core import ChainedOptimizer

        stepper = ChainedOptimizer(children)
    return steps_on(stepper, model, wrapped, rank)


@pytest.mark.parametrize(
    "dtype", sometimes([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=["fp32", "bf16"]
)
def test_optimizers_that_were_wrapped_by_hand_are_narrowed(launch, dtype):
    """Ping-pong owners make the bits of a replicated chain, on two ranks and on more ranks than some sizes need."""
    for size in (2, 3):
        whole, narrow = launch(by_hand, size, dtype, False), launch(by_hand, size, dtype, True)
        for expected, found in zip(whole, narrow, strict=True):
            assert differing(expected, found) == []


def test_ping_pong_deals_ten_parameters_to_four_ranks():
    """As the documentation of the widely used package shows it."""
    from megaopt_layerwise.narrowing import owners_by_ping_pong

    params = [nn.Parameter(torch.zeros(size + 1)) for size in range(10)]
    position = {param: at for at, param in enumerate(params)}
    owned = owners_by_ping_pong(params, 4)
    assert [[position[param] for param in of_rank] for of_rank in owned] == [
        [0, 7, 8],
        [1, 6, 9],
        [2, 5],
        [3, 4],
    ]


def from_layout(rank: int, size: int) -> tuple[bool, bool]:
    """Narrow by the layout of wrapped chunks; return whether owners are those of the layout, in all that tells them."""
    model = blocks(count=2)
    named = list(model.named_parameters())
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
        [param for _, param in named], None, size, ddp_config, names=[name for name, _ in named]
    )
    wrapped = DistributedDataParallel(model, ddp_config, full_param_layout=layout)
    params = [param for _, param in named if param.dim() == 2 and param.shape != (31, 24)]
    name_of = {param: name for name, param in named if any(param is given for given in params)}
    inner = torch.optim.SGD(params, lr=0.1)
    stepper = LayerWiseDistributedOptimizer([inner], HAND, model_chunks=[wrapped])
    stepper.set_bucket_layerwise_params_list([wrapped])
    (buffer,) = [buffer for key, buffer in layout.buffers.items() if key.is_managed_by_layer_wise]
    low, high = buffer.share(0, rank, size)
    mine = {name for name in name_of.values() if low <= buffer.param_ranges[name][0] < high}
    listed = [
        {name_of[param] for param in of_rank[rank] if param in name_of}
        for of_rank in stepper.bucket_params_lists.values()
    ]
    return mine == {name_of[param] for param in stepper.dp_cp_params_list[rank]}, mine in listed


def cut_by_layout(rank: int, size: int) -> str | None:
    """Narrow a matrix whose halves are reduced to two ranks."""
    model = nn.Linear(16, 16, bias=False)
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(use_distributed_optimizer=True))
    try:
        LayerWiseDistributedOptimizer(
            [torch.optim.SGD(model.parameters(), lr=0.1)], HAND, model_chunks=[wrapped]
        )
    except ShardingError as error:
        return str(error)
    return None


def test_owners_follow_the_layout_of_wrapped_chunks(launch):
    """The rank to whose share gradients are reduced steps the parameter; one that is cut has no owner."""
    assert launch(from_layout, 2) == [(True, True), (True, True)]
    told = "shard_params: a parameter of shape (16, 16), which the layout cuts over ranks"
    assert launch(cut_by_layout, 2) == [told, told]


def built(
    rank: int, size: int, dtype: str = "fp32", **settings: Any
) -> tuple[nn.Module, nn.Module, LayerWiseDistributedOptimizer]:
    """Build a layer-wise optimizer under torch's DDP."""
    model = blocks(dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    wrapped = TorchDDP(model) if size > 1 else model
    given = {**PLAIN, "bf16": dtype == "bf16", **settings}
    return model, wrapped, build_optimizer(wrapped, "muon", sharding="layer_wise", **given)


def norms(rank: int, size: int) -> tuple[Any, ...]:
    """Return what the public methods say of collected gradients."""
    model, wrapped, stepper = built(rank, size, clip_grad=1.0)
    for param in (model.last.weight, model.blocks[0][1].weight):
        param.grad_norm_group = "few"
    stepper = build_optimizer(wrapped, "muon", sharding="layer_wise", **PLAIN)
    assert type(stepper) is LayerWiseDistributedOptimizer
    loss_of(wrapped, batch(0, rank)).backward()
    few = [model.last.weight.grad.clone(), model.blocks[0][1].weight.grad.clone()]
    rest = [
        param.grad.clone() for param in model.parameters() if getattr(param, "grad_norm_group", None) is None
    ]
    calls, reduce = [], dist.all_reduce
    stepper.prepare_grads()

    def counted(*args, **kwargs):
        calls.append(args)
        return reduce(*args, **kwargs)

    dist.all_reduce = counted
    found = stepper.get_grad_norm(), stepper._get_grad_norm_for_group("few"), stepper.count_zeros()
    reductions = len(calls)
    expected = (
        torch.cat([grad.flatten() for grad in rest]).double().norm().item(),
        torch.cat([grad.flatten() for grad in few]).double().norm().item(),
        sum(int((grad == 0).sum()) for grad in (*few, *rest)),
    )
    return found, expected, reductions, stepper.has_grad_norm_group("few"), stepper.has_grad_norm_group("no")


def test_norms_and_zeros_are_reduced_once_over_all_ranks(launch):
    """One reduction each, whatever optimizers there are and whoever owns what."""
    for found, expected, reductions, few, no in launch(norms, 2):
        assert found == pytest.approx(expected, rel=1e-6)
        assert reductions == 3
        assert (few, no) == (True, False)


def stale(rank: int, size: int, folder: str) -> tuple[list[str], list[str]]:
    """Save to rank files, spoil, load on the owners' ranks only, and return what the model holds and goes on to."""
    model, wrapped, stepper = built(rank, size, "bf16")
    steps_on(stepper, model, wrapped, rank, 2)
    stepper.save_state_dict_to_file(f"{folder}/{rank}.pt")
    saved = values_of(model)
    steps_on(stepper, model, wrapped, rank, 1)
    further = values_of(model)
    other, other_wrapped, again = built(rank, size, "bf16")
    owned = {param for part in again.parts for piece in part.pieces for param in piece.model_params}
    with torch.no_grad():
        # Weights reach a rank only where it owns them, as a loader of owned shards would bring them.
        for name, param in other.named_parameters():
            is_matrix = param.dim() == 2 and "embedding" not in name and "head" not in name
            param.copy_(saved[name] if param in owned or not is_matrix else torch.full_like(param, 7.0))
    again.load_state_dict_from_file(f"{folder}/{rank}.pt")
    loaded = values_of(other)
    steps_on(again, other, other_wrapped, rank, 1)
    return differing(saved, loaded), differing(further, values_of(other))


def test_after_a_load_parameters_are_gathered_before_anything_reads_them(launch, tmp_path):
    """And training goes on with the bits of a run that was not interrupted."""
    assert launch(stale, 2, str(tmp_path)) == [([], []), ([], [])]


def noted(rank: int, size: int) -> list[bool]:
    """Have steps note something else on every rank, where each has its own matrices and where all have the same."""
    found = []
    for sharding in ("layer_wise", "replicated"):
        _, wrapped, stepper = built(rank, size)
        if sharding == "replicated":
            stepper = build_optimizer(wrapped, "muon", **PLAIN)
        for group in stepper.param_groups:
            if "ns_plan" in group:
                group["ns_plan"] = f"{24 + rank}x64:plain"
        found.append(any("ns_plan" in line for line in stepper.check()))
    return found


def test_owners_have_notes_of_their_own(launch):
    """What steps did with matrices that other ranks do not step is no difference; of replicas it is one."""
    assert launch(noted, 2) == [[False, True], [False, True]]


def joined(rank: int, size: int, folder: str) -> list[set[str]]:
    """Save what owners have noted, and return what each rank has in its groups: itself, and one that loads."""
    found = []
    for seen in ("saved", "loaded"):
        model, _, stepper = built(rank, size)
        if seen == "saved":
            for group in stepper.param_groups:
                if "ns_plan" in group:
                    group["ns_plan"] = f"{24 + rank}x64:plain 16x16:{('plain', 'gram')[rank]}"
            save_checkpoint(folder, model, stepper)
        else:
            load_checkpoint(folder, model, stepper)
        found.append(plans(stepper.param_groups))
    return found


def plans(groups: list[dict[str, Any]]) -> set[str]:
    """Return how groups say that their shapes are iterated."""
    return {group["ns_plan"] for group in groups if "ns_plan" in group}


def test_a_checkpoint_joins_what_owners_have_noted(launch, tmp_path):
    """Every rank resumes with the notes of all, and nothing is written into the groups of who saves."""
    own = [{"24x64:plain 16x16:plain"}, {"25x64:plain 16x16:gram"}]
    both = {"16x16:plain 24x64:plain 25x64:plain"}
    assert launch(joined, 2, str(tmp_path)) == [[mine, both] for mine in own]


def from_another_rank(rank: int, size: int, folder: str) -> str | None:
    """Load the file of the neighbour."""
    _, _, stepper = built(rank, size)
    stepper.save_state_dict_to_file(f"{folder}/{rank}.pt")
    dist.barrier()
    try:
        stepper.load_state_dict_from_file(f"{folder}/{1 - rank}.pt")
    except StateDictError as error:
        return str(error)
    return None


def test_the_file_of_another_rank_is_refused(launch, tmp_path):
    """It says whose it is, and what goes to other worlds."""
    told = launch(from_another_rank, 2, str(tmp_path))
    assert "saved on a rank that stood at dp 1 of 2, expert_dp 1 of 2, loaded at dp 0 of 2" in told[0]
    assert "save_checkpoint" in told[0]


def of_another_plan(rank: int, size: int, folder: str) -> list[str]:
    """Load what was saved under larger buckets, whose parts fit by their shapes; and a file that one rank lacks."""
    errors = []
    for path, bucket_size in ((f"{folder}/{rank}.pt", 800), (f"{folder}/{2 * rank}.pt", None)):
        steppers = []
        for size_of_buckets in (None, bucket_size):
            ddp = {"bucket_size": size_of_buckets, "overlap_grad_reduce": size_of_buckets is not None}
            config = OptimizerConfig(optimizer="muon", sharding="layer_wise", **PLAIN)
            steppers.append(get_megatron_optimizer(config, [wrapped(blocks(), "buffers", config, ddp)]))
        steppers[0].save_state_dict_to_file(f"{folder}/{rank}.pt")
        try:
            steppers[1].load_state_dict_from_file(path)
        except (StateDictError, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_a_file_of_another_plan_is_refused_and_no_rank_waits(launch, tmp_path):
    """Both ranks raise before anything has changed, whichever of them cannot load."""
    first, second = launch(of_another_plan, 2, str(tmp_path))
    for told in (first[0], second[0]):
        assert "this rank steps other parts of parameters than when it was saved" in told
    assert "another rank cannot load its state: FileNotFoundError" in first[1]
    assert second[1].startswith("FileNotFoundError")


def synced(rank: int, size: int) -> list[list[str]]:
    """Change values on their owners alone, and bring them to all ranks in every way there is."""
    results = []
    for way in ("allgather_params", "broadcast_params", "start_param_sync_for_bucket_group_subset"):
        model, _, stepper = built(rank, size)
        with torch.no_grad():
            for part in stepper.parts:
                for piece in part.pieces:
                    if piece.spec.buffer is not None and piece.spec.buffer[0].is_managed_by_layer_wise:
                        piece.param.add_(1.0)
        before = values_of(blocks())
        getattr(stepper, way)()
        stepper.finish_param_sync()
        names = {
            shard.name
            for place in stepper.routing.params.values()
            for shard in [place.spec]
            if place.strategy == "layer_wise"
        }
        now = values_of(model)
        results.append([name for name in now if not torch.equal(now[name], before[name] + (name in names))])
    return results


def test_owners_bring_their_values_to_all_ranks(launch):
    """By each of the public methods."""
    assert launch(synced, 2) == [[[], [], []], [[], [], []]]


def test_a_function_for_each_optimizer_makes_its_state():
    """One list too long or too short is refused."""
    layer = nn.Linear(3, 2)
    made = []

    def make(inner, config):
        made.append((inner, config))

    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    stepper = LayerWiseDistributedOptimizer([inner], HAND, init_state_fn_list=[make])
    assert made == [(inner, HAND)]
    assert stepper.dp_cp_params_list == [[layer.bias, layer.weight]]
    with pytest.raises(ConfigurationError, match=r"^init_state_fn_list has 2 functions for 1 optimizers"):
        LayerWiseDistributedOptimizer([torch.optim.SGD(layer.parameters())], HAND, None, [make, make])


def test_one_process_has_the_class_too():
    """Also where there is a single child."""
    layer = nn.Linear(5, 5, bias=False)
    layer.weight.matrix_view = None
    config = OptimizerConfig(optimizer="muon", lr=0.1, sharding="layer_wise")
    stepper = get_megatron_optimizer(config, [nn.Sequential(layer, nn.ReLU(), nn.Linear(5, 5, bias=False))])
    assert type(stepper) is LayerWiseDistributedOptimizer


def sharded(rank: int, size: int) -> list[str]:
    """Save slices, load them into another optimizer, and compare the whole state."""
    model, wrapped, stepper = built(rank, size)
    steps_on(stepper, model, wrapped, rank, 2)
    saved = stepper.sharded_state_dict({}, is_loading=False)
    other, other_wrapped, again = built(rank, size)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    left = steps_on(stepper, model, wrapped, rank, 1)
    return differing(left, steps_on(again, other, other_wrapped, rank, 1))


def test_sharded_state_is_what_training_goes_on_with(launch):
    """The next step has the same bits."""
    assert launch(sharded, 2) == [[], []]
