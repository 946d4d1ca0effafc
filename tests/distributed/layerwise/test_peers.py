"""Peers step parts of one matrix together, and owners of a batch some of its matrices: equal to one process."""

import itertools
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import sometimes

from megaopt_core.params import Box

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
import tensor_parallel
from layerwise_runs import several
from tensor_parallel import build, step_with
from torch import nn

from megaopt_core import MatrixView, build_optimizer
from megaopt_core.errors import UnsupportedSettingError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

EXACT = {"muon_fp32_matmul_prec": "highest"}
STEPS = 3


def train(
    rank: int,
    size: int,
    optimizer: str,
    sharding: str,
    dtype: torch.dtype,
    missing: Collection[str],
    settings: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], list[tuple[Any, ...]], dict[str, Box], int, dict[str, str]]:
    """Step on given gradients, of which some are missing in the first step; tell what is stepped here, and how much."""
    given = {**EXACT, **settings, **({"bf16": True} if dtype is torch.bfloat16 else {})}
    model, stepper, _ = build(optimizer, sharding, 1, size, dtype, **given)
    said = [step_with(model, stepper, 0, 1, step, dtype, () if step else missing) for step in range(STEPS)]
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    pieces = [piece.spec for part in stepper.parts for piece in part.pieces if len(piece.spec.shape) == 2]
    boxes = {spec.members[0][1].name: spec.members[0][1].box for spec in pieces}
    state = sum(
        value.numel()
        for part in stepper.parts
        for each in part.inner.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    )
    owners = {row.name: row.owner for row in stepper.report().params if row.owner}
    return values, said, boxes, state, owners


def furthest(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Return how far the parameter that is furthest off is, of its norm."""
    return max(
        float((found[name].float() - value.float()).norm() / value.float().norm())
        for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("optimizer", "size"),
    sometimes(itertools.product(["muon", "adaptive_muon"], [2, 4]), [("muon", 2), ("adaptive_muon", 4)]),
)
def test_peers_make_what_one_process_does(launch, optimizer, size):
    """Rows and columns, fused and plain matrices; a gradient is missing in the first step."""
    given = optimizer, "layer_wise", torch.float32, ("1.up", "2.down", "0.bias")
    alone = train(0, 1, optimizer, "replicated", *given[2:], {})
    ranks = launch(train, size, *given, {"peers_per_matrix": size})
    for values, _, boxes, _, owners in ranks:
        assert furthest(alone[0], values) < 1e-5
        assert sorted(boxes) == sorted(name for name, value in values.items() if value.dim() == 2)
        assert set(owners.values()) == {f"dp 0-{size - 1}"}
    assert [boxes["0.up"] for _, _, boxes, _, _ in ranks] == [
        ((64 // size * rank, 0), (64 // size, 16)) for rank in range(size)
    ]
    assert [boxes["0.qkv"] for _, _, boxes, _, _ in ranks] == [
        ((0, 16 // size * rank), (48, 16 // size)) for rank in range(size)
    ]
    for values, *_ in ranks[1:]:
        assert all(torch.equal(values[name], value) for name, value in ranks[0][0].items())


def test_peers_have_equal_shares_of_the_state(launch):
    """The state of all ranks together is that of one process."""
    alone = train(0, 1, "muon", "replicated", torch.float32, (), {})
    states = [
        state
        for _, _, _, state, _ in launch(
            train, 4, "muon", "layer_wise", torch.float32, (), {"peers_per_matrix": 4}
        )
    ]
    assert sum(states) == alone[3]
    assert max(states) <= 1.05 * min(states)  # biases are cut at other places


def test_blocks_of_two_among_four_ranks(launch):
    """Each block has matrices of its own; clipping counts every element once, in bf16 with main parameters too."""
    settings = {"clip_grad": 0.5, "log_num_zeros_in_grad": True}
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        alone = train(0, 1, "muon", "replicated", dtype, (), settings)
        ranks = launch(train, 4, "muon", "layer_wise", dtype, (), {**settings, "peers_per_matrix": 2})
        assert {owner for *_, owners in ranks for owner in owners.values()} == {"dp 0-1", "dp 2-3"}
        for values, said, *_ in ranks:
            assert furthest(alone[0], values) < bound
            for (_, norm, zeros), (_, expected, expected_zeros) in zip(said, alone[1], strict=True):
                assert norm == pytest.approx(expected, rel=1e-5 if dtype is torch.float32 else 1e-2)
                assert zeros == expected_zeros


def test_peers_under_every_wrapper(launch):
    """Whole gradients, and gradients that are reduce-scattered in buckets: rows are exchanged for columns."""
    overlap = {"overlap_grad_reduce": True, "bucket_size": 1500}
    overlaps = {**overlap, "overlap_param_gather": True}
    early = {"overlap_param_gather_with_optimizer_step": True}
    peers = {**EXACT, "peers_per_matrix": 2}
    runs = {
        "expected": (("muon", "replicated", "torch"), {"settings": EXACT}),
        "torch's DDP": (("muon", "layer_wise", "torch"), {"settings": peers}),
        "gathered in the step": (("muon", "layer_wise", "torch"), {"settings": {**peers, **early}}),
        "whole gradients": (("muon", "layer_wise", "whole gradients"), {"settings": peers}),
        "buffers": (("muon", "layer_wise", "buffers"), {"settings": peers}),
        "buckets": (("muon", "layer_wise", "buffers"), {"settings": peers, "ddp": overlap}),
        "overlaps": (
            ("muon", "layer_wise", "buffers"),
            {"settings": {**peers, **early, "overlap_param_gather": True}, "ddp": overlaps},
        ),
    }
    for result in launch(several, 2, runs):
        expected, _ = result.pop("expected")
        for name, (found, _) in result.items():
            assert set(found) == set(expected), name
            assert furthest(expected, found) < 1e-5, name


def large(rank: int, size: int, sharding: str) -> tuple[torch.Tensor, str]:
    """Step one matrix that is worth the exchange; return it, and who owns it."""
    torch.manual_seed(0)
    model = nn.Linear(16384, 640, bias=False)
    model.weight.matrix_view = MatrixView()
    stepper = build_optimizer(model, "muon", sharding=sharding, lr=1e-2, clip_grad=0.0, **EXACT)
    model.weight.grad = torch.randn(model.weight.shape)
    stepper.step()
    return model.weight.detach().clone(), stepper.report().params[0].owner


def test_the_cost_model_chooses_peers_for_one_large_matrix(launch):
    """Nobody asks for them; a rank would be idle otherwise."""
    alone, _ = large(0, 1, "replicated")
    for weight, owner in launch(large, 2, "layer_wise"):
        assert owner == "dp 0-1"
        assert furthest({"weight": alone}, {"weight": weight}) < 1e-5


def heads(rank: int, size: int, sharding: str) -> dict[str, tuple[torch.Tensor, str]]:
    """Step output projections `[heads, size, out]`, wide and tall; return them and their owners."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, shape in {"wide": (8, 4, 12), "tall": (4, 2, 24)}.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        model.get_parameter(name).matrix_view = MatrixView(transposed=True, first_dims=2)
    settings = {**EXACT, **({} if size == 1 else {"peers_per_matrix": size})}
    stepper = build_optimizer(model, "muon", sharding=sharding, lr=1e-2, clip_grad=0.0, **settings)
    for _ in range(STEPS):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        stepper.step()
    owners = {row.name: row.owner for row in stepper.report().params}
    return {name: (param.detach().clone(), owners[name]) for name, param in model.named_parameters()}


def test_peers_of_a_matrix_whose_inputs_are_several_dimensions(launch):
    """Parts of its heads, or of its outputs, are stepped together."""
    alone = heads(0, 1, "replicated")
    for found in launch(heads, 2, "layer_wise"):
        for name, (value, _) in alone.items():
            assert furthest({name: value}, {name: found[name][0]}) < 1e-5
            assert found[name][1] == "dp 0-1"


def experts(
    rank: int, size: int, sharding: str, settings: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], list[Box]]:
    """Step a batch of experts and a dense matrix; return values, this rank's runs, and the elements of its state."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(6, 12, 16, generator=generator))
    model.dense = nn.Parameter(torch.randn(12, 16, generator=generator))
    model.experts.matrix_view = MatrixView(batch_dims=1, label="experts")
    model.dense.matrix_view = MatrixView()
    stepper = build_optimizer(model, "muon", sharding=sharding, lr=1e-2, clip_grad=0.0, **settings)
    for _ in range(STEPS):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        stepper.step()
    boxes = [
        piece.spec.members[0][1].box
        for part in stepper.parts
        for piece in part.pieces
        if piece.spec.members[0][1].name == "experts"
    ]
    return {name: param.detach().clone() for name, param in model.named_parameters()}, boxes


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_goes_apart_into_whole_matrices(launch, size):
    """To the bits of one process: no matrix is cut."""
    alone, _ = experts(0, 1, "replicated", {})
    ranks = launch(experts, size, "layer_wise", {})
    for values, _ in ranks:
        assert all(torch.equal(values[name], value) for name, value in alone.items())
    runs = sorted(box for _, boxes in ranks for box in boxes)
    assert len(runs) == size
    assert [offsets[0] for offsets, _ in runs] == [
        sum(sizes[0] for _, sizes in runs[:at]) for at in range(size)
    ]
    assert max(sizes[0] for _, sizes in runs) <= 4


def refused(rank: int, size: int, optimizer: str, sharding: str) -> str:
    """Ask for peers where nobody takes them."""
    try:
        build(optimizer, sharding, 1, size, peers_per_matrix=2)
    except UnsupportedSettingError as error:
        return str(error)
    return "no error"


def test_peers_that_nobody_can_give_are_refused(launch):
    """The error says whether strategy or optimizer cannot."""
    pytest.importorskip("megaopt_soap")
    told = launch(refused, 2, "soap", "layer_wise")
    assert (
        told
        == [
            "peers_per_matrix=2: has no effect: 'soap' must have whole matrices with these settings; leave it out"
        ]
        * 2
    )
    told = launch(refused, 2, "muon", "replicated")
    assert "no rank steps a part of a matrix under the sharding strategy 'replicated'" in told[0]


def test_one_peer_is_the_whole_matrix(launch):
    """A matrix that is too small for as many peers gets as many as it has rows and columns."""
    ranks = launch(train, 2, "muon", "layer_wise", torch.float32, (), {"peers_per_matrix": 1})
    assert {owner for *_, owners in ranks for owner in owners.values()} == {"dp 0", "dp 1"}
    assert tensor_parallel.SHAPES["up"] == (64, 16)
