"""Pieces that hold several parameters: the pipeline, state and loading see each member."""

import copy
import io
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import frozen
from megaopt_lowbit import ParamRemainders
from torch import nn

from megaopt_core import ConstantGradScaler, OptimizerConfig
from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.execution import StepRunner
from megaopt_core.optimizers import MegatronOptimizer, OptimizerPart
from megaopt_core.optimizers._gradients.norm_deduplication import Counting
from megaopt_core.optimizers._state_dict import export_state_dict
from megaopt_core.params import Granularity, ParamSpec
from megaopt_core.precision import Fp32, MainParams
from megaopt_core.sharding import LiveModel, Piece, PieceSpec, ShardedParams

pytestmark = pytest.mark.any_python

PADDING = 3


@frozen
class Flat(ShardedParams):
    """One flat piece over both parameters, three elements of padding between them, the second without its last row."""

    pieces: list[Piece]
    params: list[nn.Parameter]
    stats_group: None = None

    def collect_grads(self) -> None:
        (piece,) = self.pieces
        piece.grad = torch.zeros_like(piece.param)
        for (offset, shard), param in zip(piece.spec.members, self.params, strict=True):
            piece.grad[offset : offset + shard.numel] = param.grad.reshape(-1)[shard.start : shard.stop]

    def take_model_values(self) -> None:
        (piece,) = self.pieces
        LiveModel([], dict(zip("ab", self.params, strict=True))).fill(piece)

    def start_param_sync(self) -> None:
        (piece,) = self.pieces
        for (offset, shard), param in zip(piece.spec.members, self.params, strict=True):
            param.data.view(-1)[shard.start : shard.stop] = piece.param[offset : offset + shard.numel]

    def finish_param_sync(self) -> None:
        pass


POLICIES = {
    "fp32": (torch.float32, {}, Fp32),
    "main": (torch.bfloat16, {"bf16": True}, MainParams),
    "remainders": (
        torch.bfloat16,
        {"bf16": True},
        lambda: ParamRemainders(state_dtypes={"exp_avg": torch.float16}),
    ),
}


def _specs(params: list[nn.Parameter]) -> PieceSpec:
    members, offset = [], 0
    for name, param, rows in (("a", params[0], 4), ("b", params[1], 4)):
        shape = tuple(param.shape)
        spec = ParamSpec(name, shape, param.dtype, param.dtype, "x", 0, Granularity.ELEMENT, 0.0)
        shard = spec.shard({}, 0, rows * shape[1])
        members.append((offset, shard))
        offset += shard.numel + PADDING
    return PieceSpec(0, (offset,), tuple(members))


def _build(
    policy: str, *, counting: Mapping[str, Counting] | None = None, seed: int = 0, **settings: Any
) -> tuple[list[nn.Parameter], MegatronOptimizer]:
    dtype, precision_settings, make = POLICIES[policy]
    generator = torch.Generator().manual_seed(seed)
    params = [
        nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype)),
        nn.Parameter(torch.randn(5, 2, generator=generator).to(dtype)),
    ]
    spec = _specs(params)
    memory = torch.zeros(spec.shape, dtype=dtype)
    for (offset, shard), param in zip(spec.members, params, strict=True):
        memory[offset : offset + shard.numel] = param.detach().reshape(-1)[shard.start : shard.stop]
    sharded = Flat([Piece(spec, nn.Parameter(memory), tuple(params))], params)
    precision = make()
    stepped = precision.attach(sharded.pieces)
    inner = torch.optim.AdamW(stepped, lr=0.1, weight_decay=0.0, foreach=False)
    config = OptimizerConfig(lr=0.1, **{"clip_grad": 0.0, **precision_settings, **settings})
    StepRunner().init_state(inner, precision, stepped, None, config)
    groups = [{**inner.param_groups[0], "params": params}]
    part = OptimizerPart(inner, precision, sharded, stepped, groups, config, counting or {})
    optimizer = MegatronOptimizer(
        [part],
        config=config,
        names=dict(zip(params, "ab", strict=True)),
        norm_groups=["other"] if counting else [],
    )
    return params, optimizer


def _give(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_members_are_stepped_like_parameters(policy) -> None:
    """Every element that the piece holds goes where an optimizer over whole parameters takes it."""
    params, optimizer = _build(policy)
    reference = [nn.Parameter(param.detach().float().clone()) for param in params]
    alone = torch.optim.AdamW(reference, lr=0.1, weight_decay=0.0, foreach=False)
    for step in range(4):
        _give(params, step)
        for param, other in zip(params, reference, strict=True):
            other.grad = param.grad.float()
        optimizer.step()
        alone.step()
    tolerance = 0.0 if policy == "fp32" else 2e-2
    torch.testing.assert_close(params[0].float(), reference[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(params[1][:4].float(), reference[1][:4], rtol=tolerance, atol=tolerance)


def test_padding_is_neither_counted_nor_measured() -> None:
    """Zeros between members are nobody's."""
    params, optimizer = _build("fp32", clip_grad=1e9, log_num_zeros_in_grad=True)
    _give(params, 0)
    params[0].grad[0, 0] = 0.0
    result = optimizer.step()
    held = [params[0].grad, params[1].grad[:4]]
    assert result.num_zeros_in_grad == 1
    assert result.grad_norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in held)), rel=1e-6)


def test_members_of_one_piece_may_be_counted_differently() -> None:
    """Each enters its own norm and is clipped by its own factor."""
    params, optimizer = _build("fp32", counting={"b": Counting(norm_group="other")}, clip_grad=0.5)
    _give(params, 0)
    norms = {None: params[0].grad.norm().item(), "other": params[1].grad[:4].norm().item()}
    optimizer.prepare_grads()
    optimizer.clip_grad_norm(0.5)
    assert optimizer.grad_norms == pytest.approx(norms, rel=1e-6)
    optimizer.step_with_ready_grads()
    moments = [optimizer.state[param]["exp_avg"].norm().item() / 0.1 for param in params]
    assert moments == pytest.approx([0.5, 0.5], rel=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_shows_each_members_elements(policy) -> None:
    """In the parameter's shape where all of it is here, flat where a part is; writing changes the piece."""
    params, optimizer = _build(policy)
    _give(params, 0)
    optimizer.step()
    first, second = (optimizer.state[param] for param in params)
    assert first["exp_avg"].shape == (4, 3)
    assert second["exp_avg"].shape == (8,)
    assert first["step"].item() == second["step"].item() == 1.0
    torch.testing.assert_close(first["exp_avg"], 0.1 * params[0].grad.float(), rtol=1e-3, atol=1e-6)
    second["exp_avg"] = torch.full((8,), 0.5)
    assert second["exp_avg"].unique().tolist() == [0.5]
    torch.testing.assert_close(first["exp_avg"], 0.1 * params[0].grad.float(), rtol=1e-3, atol=1e-6)
    if policy != "fp32":
        second["main_param"] = torch.full((8,), 0.25)
        assert second["main_param"].unique().tolist() == [0.25]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_dict_of_parts_cannot_be_pickled(policy) -> None:
    """One rank's part would be taken for the whole; the error tells of checkpoints."""
    _, optimizer = _build(policy)
    with pytest.raises(UnsupportedOperationError) as caught:
        torch.save(optimizer.state_dict(), io.BytesIO())
    assert str(caught.value) == (
        "a slice of a sharded tensor cannot be pickled or copied. Use save_checkpoint() and load_checkpoint(), or "
        "torch.distributed.checkpoint: each shard is saved once, and loads on any number of ranks"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_exported_parts_continue_the_run(policy) -> None:
    """By name, member for member."""
    params, first = _build(policy)
    for step in range(3):
        _give(params, step)
        first.step()
    others, second = _build(policy, seed=1)
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
        for (offset, shard), other in zip(second.parts[0].pieces[0].spec.members, others, strict=True):
            second.parts[0].pieces[0].param[offset : offset + shard.numel] = other.reshape(-1)[
                shard.start : shard.stop
            ]
    second.load_state_dict(export_state_dict(first))
    for mine, optimizer in ((params, first), (others, second)):
        _give(mine, 3)
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, others, strict=True))


def test_state_made_late_is_loaded_into_the_piece() -> None:
    """Members that bring a key the piece does not have make it, zero elsewhere."""
    params, optimizer = _build("fp32")
    optimizer.state[params[1]]["late"] = torch.ones(8)
    piece_state = optimizer.parts[0].inner.state[optimizer.parts[0].stepped[0]]["late"]
    assert piece_state.shape == optimizer.parts[0].stepped[0].shape
    assert piece_state.sum().item() == 8.0


def test_a_known_parameter_without_a_piece_has_empty_state() -> None:
    """Another rank steps it."""
    _, optimizer = _build("fp32")
    elsewhere = nn.Parameter(torch.ones(1))
    optimizer.names[elsewhere] = "elsewhere"
    assert dict(optimizer.state[elsewhere]) == {}


def test_overflow_in_a_member_skips_the_piece() -> None:
    """With a scaler, as without."""
    params, optimizer = _build("main")
    optimizer.grad_scaler = ConstantGradScaler(2.0)
    _give(params, 0)
    params[1].grad[0, 0] = float("inf")
    before = [param.detach().clone() for param in params]
    assert optimizer.step().update_successful is False
    assert all(torch.equal(*pair) for pair in zip(before, params, strict=True))


@pytest.mark.parametrize("rows", [False, True])
def test_one_parameter_in_two_pieces_has_one_state(rows) -> None:
    """Two ranges, or two boxes: state is read joined, and what is assigned or loaded reaches both."""
    weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    dtype = weight.dtype
    spec = ParamSpec("a", (4, 3), dtype, dtype, "x", 0, Granularity.ELEMENT, 0.0)
    shards = [spec.shard({}, 0, 6), spec.shard({}, 6, 12)]
    if rows:
        shards = [spec.part(((0, 0), (4, 2))), spec.part(((0, 2), (4, 1)))]
    model = LiveModel([], {"a": weight})
    pieces = [model.new_piece(PieceSpec.of(shard, 0)) for shard in shards]
    precision = Fp32()
    stepped = precision.attach(pieces)
    inner = torch.optim.SGD(stepped, lr=1.0, momentum=0.5)
    sharded = Several(pieces, model)
    config, groups = OptimizerConfig(clip_grad=0.0), [{**inner.param_groups[0], "params": [weight]}]
    part = OptimizerPart(inner, precision, sharded, stepped, groups, config)
    optimizer = MegatronOptimizer([part], config=config, names={weight: "a"})
    reference = nn.Parameter(weight.detach().clone())
    whole_one = torch.optim.SGD([reference], lr=1.0, momentum=0.5)
    for step in range(2):
        _give([weight, reference], step)
        reference.grad = weight.grad.clone()
        optimizer.step()
        whole_one.step()
    assert torch.equal(weight, reference)
    momentum = optimizer.state[weight]["momentum_buffer"]
    expected = whole_one.state[reference]["momentum_buffer"]
    if rows:
        assert torch.equal(momentum, torch.cat([expected[:, :2].reshape(-1), expected[:, 2:].reshape(-1)]))
    else:
        assert torch.equal(momentum, expected)
    assert len(optimizer.state) == 1
    saved = copy.deepcopy(optimizer.state_dict()) if not optimizer.state.cut_names() else None
    assert saved is not None
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(momentum)
    assert not any(bool(inner.state[tensor]["momentum_buffer"].any()) for tensor in stepped)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)


class Several(ShardedParams):
    """Pieces with memory of their own, of a model in one process."""

    stats_group = None

    def __init__(self, pieces: list[Piece], model: LiveModel) -> None:
        self.pieces, self.model = pieces, model

    def collect_grads(self) -> None:
        for piece in self.pieces:
            ((_, shard),) = piece.spec.members
            grad = self.model.grad(shard)
            piece.grad = None if grad is None else grad.view(piece.param.shape)

    def take_model_values(self) -> None:
        for piece in self.pieces:
            self.model.fill(piece)

    def start_param_sync(self) -> None:
        for piece in self.pieces:
            ((_, shard),) = piece.spec.members
            self.model.store(shard, piece.param.detach())

    def finish_param_sync(self) -> None:
        pass
