"""Model values that somebody else writes between two steps are taken over, element by element, never overwritten."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import define, field
from hypothesis import given, strategies
from megaopt_lowbit.remainders import Remainder, join_remainder, split_remainder
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import ProcessGroupCollection, hookimpl
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.precision._storage import take_changed
from megaopt_core.sharding import (
    LiveModel,
    ParamLayout,
    PieceSpec,
    Replicated,
    ReplicatedParams,
    ShardingStrategy,
)

pytestmark = pytest.mark.any_python

MIXED = [
    {"bf16": True},
    {"bf16": True, "use_precision_aware_optimizer": True},
    {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": False},
    {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
    {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.bfloat16},
    {"fp16": True, "loss_scale": 1.0},
]


def dtype_of(precision: Mapping[str, Any]) -> torch.dtype:
    """The model's dtype under a configuration."""
    return torch.float16 if precision.get("fp16") else torch.bfloat16


def mains_of(model: nn.Module, optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Copies of all main values; of a parameter without one, the parameter."""
    return [
        optimizer.state[param].get("main_param", param).detach().clone().float()
        for param in model.parameters()
    ]


def by_copy(param: torch.Tensor, values: torch.Tensor) -> None:
    """As `load_state_dict` writes."""
    with torch.no_grad():
        param.copy_(values)


def by_data(param: torch.Tensor, values: torch.Tensor) -> None:
    """As weight averages often write: no version is counted."""
    param.data.copy_(values)


def by_new_memory(param: torch.Tensor, values: torch.Tensor) -> None:
    """Other memory, in which the old values never were."""
    param.data = values.to(param.dtype)


WRITERS = [by_copy, by_data, by_new_memory]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("precision", MIXED)
def test_a_step_goes_on_from_what_was_written(mlp, build, give, precision, write) -> None:
    """Each weight moves by no more than Adam moves it, from the value that somebody gave it."""
    model, other = mlp(dtype_of(precision)), mlp(dtype_of(precision), seed=1)
    optimizer = build(model, lr=1e-3, **precision)
    give(model)
    optimizer.step()
    for param, value in zip(model.parameters(), other.parameters(), strict=True):
        write(param, 3.0 * value.detach())
    give(model, 1)
    optimizer.step()
    for param, value in zip(model.parameters(), other.parameters(), strict=True):
        rounding = 2.0**-8 * value.abs().max().item() * 3.0
        assert (param - 3.0 * value).abs().max().item() <= 2e-3 + rounding


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("precision", MIXED)
def test_swapping_averaged_weights_in_and_out_changes_no_bit(mlp, build, give, precision, write) -> None:
    """An evaluation between two steps leaves the same training behind it."""
    runs = []
    for swapped in (False, True):
        model, average = mlp(dtype_of(precision)), mlp(dtype_of(precision), seed=1)
        optimizer = build(model, lr=1e-3, **precision)
        for step in range(4):
            if swapped:
                kept = [param.detach().clone() for param in model.parameters()]
                for param, value in zip(model.parameters(), average.parameters(), strict=True):
                    write(param, value.detach().clone())
                for param, value in zip(model.parameters(), kept, strict=True):
                    write(param, value)
                if step == 2:
                    optimizer.reload_model_params()
            give(model, step)
            optimizer.step()
        runs.append([*(param.detach() for param in model.parameters()), *mains_of(model, optimizer)])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@pytest.mark.parametrize("precision", MIXED[:4])
def test_only_written_elements_change(mlp, build, give, precision) -> None:
    """A reset of one row takes that row over; the main values of the others keep all of their bits."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, lr=1e-3, **precision)
    give(model)
    optimizer.step()
    before = mains_of(model, optimizer)
    with torch.no_grad():
        model[0].weight[1].fill_(0.25)
    for param in model.parameters():
        param.grad = None
    optimizer.step()
    after = mains_of(model, optimizer)
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        rows = [row for row in range(len(old)) if (position, row) != (0, 1)]
        assert torch.equal(old[rows], new[rows])
    assert torch.equal(after[0][1].bfloat16(), torch.full((5,), 0.25, dtype=torch.bfloat16))


def by_alias(param: torch.Tensor, at: tuple[int, int], value: float) -> None:
    """Through memory that is shared and counts nothing."""
    param.data[at] = value


def by_numpy(param: torch.Tensor, at: tuple[int, int], value: float) -> None:
    """Through an array of the same memory."""
    bits = torch.tensor(value, dtype=param.dtype).view(torch.int16).item()
    param.detach().view(torch.int16).numpy()[at] = bits


def by_storage(param: torch.Tensor, at: tuple[int, int], value: float) -> None:
    """As a kernel writes: to an address."""
    flat = torch.tensor([], dtype=param.dtype).set_(param.untyped_storage())
    flat[at[0] * param.stride(0) + at[1] * param.stride(1)] = value


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@pytest.mark.parametrize("write", [by_alias, by_numpy, by_storage])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("precision", MIXED[:4])
def test_one_element_that_nothing_counts(build, write, is_transposed, precision) -> None:
    """Every element of a tensor that is not large is compared; the main values of the others keep all of their bits."""
    pytest.importorskip("numpy")
    chance = torch.Generator().manual_seed(0)
    for at in [(0, 0), (0, 1), (13, 40), (40, 13), (63, 62), (63, 63)]:
        torch.manual_seed(1)
        model = nn.Linear(64, 64, bias=False).bfloat16()
        if is_transposed:
            model.weight.data = model.weight.data.t().contiguous().t()
        optimizer = build(model, lr=1e-3, **precision)
        model.weight.grad = torch.randn(64, 64, generator=chance).bfloat16()
        optimizer.step()
        (before,) = mains_of(model, optimizer)
        write(model.weight, at, 3.0)
        model.weight.grad = None
        optimizer.step()
        (after,) = mains_of(model, optimizer)
        assert after[at].bfloat16() == 3.0  # a remainder may stay
        before[at] = after[at]
        assert torch.equal(after, before)


def test_one_element_of_a_large_tensor_is_taken_over_when_it_is_said(build) -> None:
    """What no counter and no sample tells `reload_model_params` takes over, element by element."""
    model = nn.Linear(300, 200, bias=False).bfloat16()
    optimizer = build(model, lr=1e-3, bf16=True)
    model.weight.grad = torch.ones(200, 300).bfloat16()
    optimizer.step()
    (before,) = mains_of(model, optimizer)
    model.weight.data[123, 45] = 3.0
    optimizer.reload_model_params()
    before[123, 45] = 3.0
    assert torch.equal(mains_of(model, optimizer)[0], before)


def test_a_write_before_a_skipped_step_is_not_forgotten(mlp, build, give) -> None:
    """The step that does not happen leaves it to the next."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, lr=1e-3, bf16=True)
    by_data(model[0].weight, torch.full((7, 5), 2.0))
    give(model)
    model[0].weight.grad[0, 0] = torch.inf
    assert not optimizer.step().update_successful
    give(model)
    assert optimizer.step().update_successful
    assert (model[0].weight - 2.0).abs().max().item() < 0.02


def test_writes_in_inference_mode_are_noticed(mlp, build, give) -> None:
    """Tensors made there count nothing; writes to others do."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, lr=1e-3, bf16=True)
    give(model)
    optimizer.step()
    with torch.inference_mode():
        model[0].weight.data.fill_(2.0)
    give(model)
    optimizer.step()
    assert (model[0].weight - 2.0).abs().max().item() < 0.02


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
def test_a_loaded_main_value_wins_over_an_earlier_write(mlp, build, give) -> None:
    """Model first, optimizer second: what the optimizer's state says of main values holds."""
    model = mlp(torch.bfloat16)
    optimizer = build(model, lr=1e-3, bf16=True)
    give(model)
    optimizer.step()
    saved, mains = copy.deepcopy(optimizer.state_dict()), mains_of(model, optimizer)
    for param in model.parameters():
        by_copy(param, torch.ones_like(param))
    optimizer.load_state_dict(saved)
    for param in model.parameters():
        param.grad = None
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(mains, mains_of(model, optimizer), strict=True))


def test_full_precision_watches_nothing(mlp, build) -> None:
    """A parameter that is stepped where it is needs no look."""
    optimizer = build(mlp())
    [part] = optimizer.parts
    assert part.writes.kept == []


@define
class OwnParams(ReplicatedParams):
    """Pieces with memory of their own, as of strategies that step whole tensors elsewhere."""

    live: LiveModel = field(default=None)

    def collect_grads(self) -> None:
        """Take gradients of the model's."""
        for piece in self.pieces:
            piece.grad = piece.model_params[0].grad

    def take_model_values(self) -> None:
        """Copy the model into the pieces."""
        for piece in self.pieces:
            self.live.fill(piece)

    def start_param_sync(self) -> None:
        """Copy the pieces into the model."""
        for piece in self.pieces:
            ((_, shard),) = piece.spec.members
            self.live.store(shard, piece.param.detach().view(-1))


class OwnMemory(Replicated):
    """Replicates into memory of its own."""

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> OwnParams:
        """Return pieces that share nothing with the model."""
        specs: list[PieceSpec] = [spec for spec in layout.pieces(model.rank) if spec.group in set(groups)]
        return OwnParams([model.new_piece(spec) for spec in specs], live=model)


class OwnMemoryPlugin:
    """Offers it."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        """One strategy."""
        return {"own_memory": OwnMemory(name="own_memory")}


@pytest.mark.parametrize("write", WRITERS[:2])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_memory_of_a_strategys_own_takes_writes_over_too(mlp, build, give, precision, write) -> None:
    """In full precision as well: the model would be overwritten from there."""
    with temporary_plugin(OwnMemoryPlugin(), "own-memory"):
        model = mlp(torch.bfloat16 if precision else torch.float32)
        optimizer = build(model, lr=0.05, sharding="own_memory", **precision)
        give(model)
        optimizer.step()
        write(model[0].weight, torch.full((7, 5), 2.0))
        give(model, 1)
        optimizer.step()
        assert (model[0].weight - 2.0).abs().max().item() < 0.1
        assert not torch.equal(model[0].weight, torch.full_like(model[0].weight, 2.0))


FLOATS = strategies.floats(width=32, allow_nan=True, allow_infinity=True)


@given(strategies.lists(strategies.tuples(FLOATS, FLOATS), min_size=1, max_size=8))
def test_a_main_value_stays_exactly_where_it_rounds_to_the_models(pairs) -> None:
    """For any main and model values, zeros, infinities and NaN among them."""
    main = torch.tensor([pair[0] for pair in pairs])
    model = torch.tensor([pair[1] for pair in pairs]).bfloat16()
    model[::2] = main.bfloat16()[::2]
    taken = main.clone()
    take_changed(taken, model)
    for old, new, value in zip(main, taken, model, strict=True):
        same = old.bfloat16() == value or (old.isnan() and value.isnan())
        expected = old if same else value.float()
        assert torch.equal(new, expected) or (new.isnan() and expected.isnan())


@given(strategies.lists(strategies.tuples(FLOATS, FLOATS), min_size=1, max_size=8))
def test_a_remainder_makes_the_models_value_or_goes(pairs) -> None:
    """After anything was written, parameter and remainder make a value that rounds to the parameter."""
    storage = Remainder(nn.Parameter(torch.zeros(len(pairs), dtype=torch.bfloat16)))
    with torch.no_grad():
        storage.store(torch.tensor([pair[0] for pair in pairs]))
        kept = storage.remainder.clone()
        storage.param.copy_(torch.tensor([pair[1] for pair in pairs]))
        storage.take_model()
        main = join_remainder(storage.param, storage.remainder)
    rounded, _ = split_remainder(main)
    for value, model, old, new in zip(rounded, storage.param.detach(), kept, storage.remainder, strict=True):
        assert value == model or (value.isnan() and model.isnan())
        assert new in (old, 0)


def test_a_weight_that_is_viewed_otherwise_is_taken_over(build):
    """The same memory with other strides holds other values: a transposed weight, which no version counter tells of."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6, bias=False).bfloat16()
    optimizer = build(model, lr=0.0, bf16=True, clip_grad=0.0)
    for _ in range(2):
        model.weight.data = model.weight.data.t()
        transposed = model.weight.detach().clone()
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        assert torch.equal(model.weight, transposed)
