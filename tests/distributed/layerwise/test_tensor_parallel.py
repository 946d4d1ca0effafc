"""A matrix that tensor parallelism cuts has one owner, goes to it and comes back in one collective a direction."""

import itertools
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from tensor_parallel import build, cut, step_with
from torch.distributed.device_mesh import init_device_mesh

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

STEPS = 3


def train(
    rank: int,
    size: int,
    tp: int,
    optimizer: str,
    sharding: str,
    dtype: torch.dtype,
    missing: Collection[str],
    settings: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], int, list[tuple[Any, ...]], list[str]]:
    """Step a few times; the missing ones get no gradient in the first. Return parameters, place, what steps said."""
    given = {**settings, **({"bf16": True} if dtype is torch.bfloat16 else {})}
    model, stepper, place = build(optimizer, sharding, tp, size, dtype, **given)
    said = [
        step_with(model, stepper, place, tp, step, dtype, () if step else missing) for step in range(STEPS)
    ]
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    owned = [
        name
        for part in stepper.parts
        for piece in part.pieces
        if piece.spec.buffer is None
        for name in [piece.spec.members[0][1].name]
    ]
    return values, place, said, owned


def wrong(
    alone: tuple[dict[str, torch.Tensor], int, list[tuple[Any, ...]], list[str]],
    ranks: Sequence[tuple[dict[str, torch.Tensor], int, list[tuple[Any, ...]], list[str]]],
    tp: int,
) -> list[tuple[int, str]]:
    """Return what differs from one process, on any rank."""
    return [
        (rank, name)
        for rank, (values, place, _, _) in enumerate(ranks)
        for name, value in values.items()
        if not torch.equal(value, cut(name, alone[0][name], tp, place))
    ]


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    sometimes(
        itertools.product(["muon", "adaptive_muon", "soap"], [torch.float32, torch.bfloat16]),
        [("muon", torch.float32), ("adaptive_muon", torch.bfloat16), ("soap", torch.float32)],
    ),
)
def test_the_bits_are_those_of_one_process(launch, optimizer, dtype):
    """Two tensor-parallel ranks, alone and on two data-parallel ones; a gradient is missing in the first step."""
    pytest.importorskip("megaopt_soap" if optimizer == "soap" else "megaopt_muon")
    given = optimizer, "layer_wise", dtype, ("1.up", "2.down", "0.bias"), {}
    alone = train(0, 1, 1, optimizer, "replicated", *given[2:])
    for size in (2, 4):
        ranks = launch(train, size, 2, *given)
        assert wrong(alone, ranks, 2) == []
        assert sorted(name for _, _, _, owned in ranks for name in owned) == sorted(
            name for name in alone[0] if name.rpartition(".")[2] not in ("plain", "bias")
        )


def test_whole_matrices_ask_nothing_of_tensor_parallel_muon(launch):
    """However the class would treat a cut matrix, an owner has all of it: no rank waits for another in the step."""
    alone = train(0, 1, 1, "muon", "replicated", torch.float32, (), {})
    for mode in ("duplicated", "distributed"):
        ranks = launch(train, 2, 2, "muon", "layer_wise", torch.float32, (), {"muon_tp_mode": mode})
        assert wrong(alone, ranks, 2) == []


def test_clipping_counts_every_element_once(launch):
    """Norm and zeros are those of one process to rounding, and so is what is stepped."""
    settings = {"clip_grad": 0.5, "log_num_zeros_in_grad": True}
    alone = train(0, 1, 1, "muon", "replicated", torch.float32, (), settings)
    for values, place, said, _ in launch(train, 4, 2, "muon", "layer_wise", torch.float32, (), settings):
        for (_, norm, zeros), (_, expected, expected_zeros) in zip(said, alone[2], strict=True):
            assert norm == pytest.approx(expected, rel=1e-6)
            assert zeros == expected_zeros
        for name, value in values.items():
            assert (value - cut(name, alone[0][name], 2, place)).norm() <= 1e-6 * value.norm()


def collectives(rank: int, size: int, layers: int) -> int:
    """Return how many collectives over the tensor-parallel ranks two steps begin."""
    import tensor_parallel

    tensor_parallel.LAYERS = layers
    model, stepper, place = build("muon", "layer_wise", 2, size)
    calls = []
    exchange = dist.all_to_all_single

    def counted(*args, **kwargs):
        calls.append(args)
        return exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    step_with(model, stepper, place, 2, 0, torch.float32)
    step_with(model, stepper, place, 2, 1, torch.float32)
    return len(calls)


def test_a_step_exchanges_twice_however_many_matrices_there_are(launch):
    """Gradients to owners, values back."""
    assert [launch(collectives, 2, layers) for layers in (1, 6)] == [[4, 4], [4, 4]]


EARLY = {"overlap_param_gather_with_optimizer_step": True}


def order_of_events(rank: int, size: int, layers: int) -> list[str]:
    """Return what one step begins and ends, in order: exchanges, and inner steps over matrices."""
    import tensor_parallel

    tensor_parallel.LAYERS = layers
    model, stepper, place = build("muon", "layer_wise", 2, size, **EARLY)
    step_with(model, stepper, place, 2, 0, torch.float32)
    events, exchange = [], dist.all_to_all_single

    class Awaited:
        def __init__(self, work):
            self.work = work

        def wait(self):
            self.work.wait()
            events.append("arrived")

    def begins(*args, **kwargs):
        events.append("begins")
        return Awaited(exchange(*args, **kwargs))

    dist.all_to_all_single = begins
    for part in stepper.parts:
        if "Muon" in type(part.inner).__name__:
            part.inner.register_step_post_hook(lambda *_: events.append("step"))
    step_with(model, stepper, place, 2, 1, torch.float32)
    return events


def test_values_travel_back_while_further_matrices_are_stepped(launch):
    """The first half is awaited only after the second is stepped: three exchanges, of any number of matrices."""
    for layers in (2, 6):
        for events in launch(order_of_events, 2, layers):
            assert events[:5] == ["begins", "arrived", "step", "begins", "step"]
            assert [event for event in events if event != "step"] == [
                *("begins", "arrived"),
                *("begins", "begins", "arrived", "arrived"),
            ]


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=["fp32", "bf16"])
def test_values_that_travel_early_are_the_same_bits(launch, size, dtype):
    """Alone, and with copies on other data-parallel ranks, to which nothing goes before it has come back."""
    given = dtype, ("1.up", "2.down"), {}
    alone = train(0, 1, 1, "muon", "replicated", *given)
    ranks = launch(train, size, 2, "muon", "layer_wise", *given[:2], EARLY)
    assert wrong(alone, ranks, 2) == []


def one_matrix(
    rank: int, size: int, sharding: str, settings: Mapping[str, Any]
) -> tuple[torch.Tensor, list[float | None], int]:
    """Step a model in which one matrix alone is cut, beside a frozen one, and the second step has no gradient of it."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for name, shape in (("only", (12, 8)), ("frozen", (6, 8))):
        part = torch.randn(shape).chunk(size)[rank].clone()
        model.register_parameter(name, torch.nn.Parameter(part))
        model.get_parameter(name).matrix_view = MatrixView()
        model.get_parameter(name).tensor_model_parallel, model.get_parameter(name).partition_dim = True, 0
    model.frozen.requires_grad_(requires_grad=False)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp")) if size > 1 else None
    stepper = build_optimizer(model, "muon", sharding=sharding, lr=0.1, pg_collection=mesh, **settings)
    said = []
    for step in range(3):
        grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        model.only.grad = None if step == 1 else grad.chunk(size)[rank].clone()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no parameter has a gradient", UserWarning)
            said.append(stepper.step().grad_norm)
    return model.only.detach().clone(), said, sum(len(part.pieces) for part in stepper.parts)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_own_nothing_step_along(launch, size):
    """One cut matrix on two or three ranks: those without it send and receive their parts all the same."""
    expected, norms, _ = one_matrix(0, 1, "replicated", {"clip_grad": 1.0})
    for settings in ({}, EARLY):
        ranks = launch(one_matrix, size, "layer_wise", {"clip_grad": 1.0, **settings})
        assert sorted(owned for _, _, owned in ranks) == [*[0] * (size - 1), 1]
        for rank, (values, told, _) in enumerate(ranks):
            assert told == pytest.approx(norms, rel=1e-6)
            torch.testing.assert_close(values, expected.chunk(size)[rank], rtol=1e-6, atol=1e-7)


def changed_between_steps(rank: int, size: int) -> list[str]:
    """Load other values into the model, step with a learning rate of 0, and return what the model holds."""
    model, stepper, place = build("muon", "layer_wise", 2, size, lr=0.0)
    step_with(model, stepper, place, 2, 0, torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    stepper.reload_model_params()
    step_with(model, stepper, place, 2, 1, torch.float32)
    return [name for name, param in model.named_parameters() if not torch.equal(param, expected[name])]


def test_values_that_somebody_else_wrote_reach_the_owners(launch):
    """`reload_model_params` brings the parts of every cut matrix to the rank that steps it."""
    assert launch(changed_between_steps, 2) == [[], []]
