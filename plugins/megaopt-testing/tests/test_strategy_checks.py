"""Checks of strategies: the kit's own and `replicated` pass, and each check catches a strategy that it is for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from megaopt_testing import CheckStatus, run_checks, temporary_plugin
from megaopt_testing.strategies import Owners, RowLayout, Rows
from megaopt_testing.strategies.layouts import OwnerLayout
from megaopt_testing.strategy_checks import STRATEGY_CHECKS

from megaopt_core import ShardingStrategy, hookimpl

pytestmark = pytest.mark.any_python


@frozen
class TwiceOwnedLayout(RowLayout):
    """The first rank has everything, the others their rows as well."""

    def shard(self, spec: Any, rank: int) -> Any:
        return super().shard(spec, rank) if rank else spec.shard({})


@frozen
class OwnedTwice(Rows):
    def layout(self, specs: Any, world: Any, options: Any) -> RowLayout:
        return TwiceOwnedLayout(tuple(specs), world.size("dp"))


@frozen
class GoesByTheRank(Owners):
    """Deals from the rank on that asks."""

    def layout(self, specs: Any, world: Any, options: Any) -> OwnerLayout:
        first = (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0) % len(specs)
        return OwnerLayout((*specs[first:], *specs[:first]), world.size("dp"))


@frozen
class Unaligned(RowLayout):
    """Cuts anywhere."""

    def shard(self, spec: Any, rank: int) -> Any:
        elements = torch.Size(spec.shape).numel()
        share = -(-elements // self.ranks)
        return spec.shard({}, min(rank * share, elements), min((rank + 1) * share, elements))


@frozen
class CutAnywhere(Rows):
    granularities = frozenset({"element"})

    def layout(self, specs: Any, world: Any, options: Any) -> RowLayout:
        return Unaligned(tuple(specs), world.size("dp"))


class Faulty(Rows):
    """Attaches pieces with a fault."""

    def attach(self, *args: Any, **kwargs: Any) -> Any:
        params = super().attach(*args, **kwargs)
        self.spoil(params)
        return params

    def spoil(self, params: Any) -> None:
        raise NotImplementedError


class KeepsValues(Faulty):
    """Leaves what it stepped on its own rank."""

    def spoil(self, params: Any) -> None:
        params.finish_param_sync = lambda: [work.wait() for work, _, _ in params._gathered if work]


class SendsFloat32Only(Faulty):
    """Brings no bf16 to other ranks."""

    def spoil(self, params: Any) -> None:
        start = params.start_param_sync
        dtypes = {param.dtype for param in params.model.params.values()}
        params.start_param_sync = lambda: start() if dtypes == {torch.float32} else None


class MeasuresAlone(Faulty):
    """Adds no norms up."""

    def spoil(self, params: Any) -> None:
        params.stats_group = None


class TakesNothing(Faulty):
    """Does not look at what was loaded."""

    def spoil(self, params: Any) -> None:
        params.take_model_values = lambda: None


class TakesOnce(Faulty):
    """Looks at what was loaded the first time."""

    def spoil(self, params: Any) -> None:
        take, times = params.take_model_values, []

        def first_time() -> None:
            if not times:
                take()
            times.append(1)

        params.take_model_values = first_time


class Backwards(Owners):
    """Holds the elements of a piece from the last to the first, consistently."""

    def attach(self, *args: Any, **kwargs: Any) -> Any:
        params = super().attach(*args, **kwargs)
        model = params.model
        collect, fill, store = params.collect_grads, model.fill, model.store

        def flipped(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.reshape(-1).flip(0).view(tensor.shape)

        def collect_grads() -> None:
            collect()
            for piece in params.pieces:
                piece.grad = None if piece.grad is None else flipped(piece.grad)

        def fill_piece(piece: Any) -> None:
            fill(piece)
            with torch.no_grad():
                piece.param.copy_(flipped(piece.param))

        params.collect_grads = collect_grads
        params.take_model_values = lambda: [fill_piece(piece) for piece in params.pieces]
        params.model = _Proxy(model, fill_piece, lambda shard, values: store(shard, flipped(values)))
        params.take_model_values()
        return params


class _Proxy:
    """A live model that fills and stores otherwise."""

    def __init__(self, model: Any, fill: Any, store: Any) -> None:
        self.model, self.fill, self.store = model, fill, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


BAD: dict[str, tuple[str, ShardingStrategy, str]] = {
    "owned_twice": ("layout", OwnedTwice(), "is not valid"),
    "cut_anywhere": ("layout", CutAnywhere(), "is not valid"),
    "keeps_values": ("ranks_agree", KeepsValues(), "Does every rank send the values that it stepped"),
    "sends_float32_only": ("ranks_agree", SendsFloat32Only(), "in bf16"),
    "measures_alone": ("norms", MeasuresAlone(), "Is stats_group the group over which pieces add up"),
    "takes_nothing": ("model_values", TakesNothing(), "take_model_values() must fill every piece"),
    "takes_once": ("model_values", TakesOnce(), "take_model_values() must fill every piece"),
    "goes_by_the_rank": ("layout", GoesByTheRank(), "two ranks get different layouts"),
    "backwards": ("checkpoints", Backwards(), "get other values"),
}
"""Name to the check that it fails, the strategy, and what the message says."""


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        return {name: evolve(strategy, name=name) for name, (_, strategy, _) in BAD.items()}


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with temporary_plugin(Plugin(), name="bad-strategies"):
        yield


@pytest.mark.parametrize("name", ["replicated", "kit_rows", "kit_owners"])
def test_good_strategies_pass(name: str) -> None:
    """Without a plugin but the kit."""
    results = run_checks(name, kind="strategy")
    assert {result.id: result.message for result in results if result.status is not CheckStatus.PASSED} == {}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_strategy_fails_the_check_that_it_is_for(name: str) -> None:
    """The message says what to mend."""
    intended, _, told = BAD[name]
    (result,) = run_checks(
        name, kind="strategy", checks=[check for check in STRATEGY_CHECKS if check.id == intended]
    )
    assert result.status is CheckStatus.FAILED
    assert told in result.message, result.message
    assert result.hint


def test_every_check_has_a_strategy_that_it_catches() -> None:
    """A check that nothing can fail proves nothing."""
    assert {intended for intended, _, _ in BAD.values()} == {check.id for check in STRATEGY_CHECKS}


@pytest.mark.parametrize(
    ("name", "package"), {"distributed": "megaopt_distributed", "layer_wise": "megaopt_layerwise"}.items()
)
def test_installed_strategies_pass(name: str, package: str) -> None:
    """Those that step a plain model; what cannot be tried is skipped with its reason."""
    pytest.importorskip(package)
    results = run_checks(name, kind="strategy")
    assert {result.id: result.message for result in results if not result.ok} == {}
