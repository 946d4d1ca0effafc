"""What a strategy gets wrong is said when an optimizer is built: nothing is lost in silence."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve, frozen
from megaopt_testing import require_partition, temporary_plugin

from megaopt_core import (
    Granularity,
    OptimizerConfig,
    OptimizerEntry,
    ParamSpec,
    ProcessGroupCollection,
    ShardingStrategy,
    build_optimizer,
    get_registry,
    hookimpl,
    route,
)
from megaopt_core.errors import OwnershipError, PluginError, ShardingError
from megaopt_core.optimizers._gradients.norm_deduplication import Counting
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.params import ParamInfo, RankCoordinates, Shard
from megaopt_core.routing._sharding import reduced_elsewhere
from megaopt_core.sharding import (
    LayoutOptions,
    LiveModel,
    ParamLayout,
    Peers,
    Piece,
    PieceSpec,
    ShardedParams,
    World,
)
from megaopt_core.sharding._attached import make_peer_groups, require_sharded_params

SPEC = ParamSpec(
    "w", (4, 8), torch.float32, torch.float32, "any", 0, Granularity.ELEMENT, 32.0, takes_peers=True
)
ROWS = [SPEC.part(((first, 0), (2, 8))) for first in (0, 2)]
COLUMNS = [SPEC.part(((0, first), (4, 4))) for first in (0, 4)]


@frozen
class Given:
    """Pieces by data-parallel rank."""

    ranks: tuple

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return those of a rank."""
        return self.ranks[rank.get("dp", 0)]


def piece(shard: Shard, index: int, dim: int | None = None, size: int = 2) -> PieceSpec:
    """Return a piece of one of two peers."""
    return PieceSpec.of(shard, 0, peers=Peers("dp", size, index, dim))


WRONG = {
    "a replica alone": (
        ([], [piece(SPEC.shard({}), 1)]),
        "only 1 of the 2 peers along 'dp' have a piece of 'w'",
    ),
    "a part without its peer": (
        ([piece(SPEC.shard({}), 0, dim=0)], []),
        "only 1 of the 2 peers along 'dp' have a piece of 'w'",
    ),
    "parts along another dimension": (
        ([piece(COLUMNS[0], 0, dim=0)], [piece(COLUMNS[1], 1, dim=0)]),
        "the parts of 2 peers along 'dp' are not cut along dimension 0 alone",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_peers_are_complete_and_cut_as_they_say(case):
    """A replica that is not the first never counts alone, and ranks with parts wait for each other."""
    ranks, message = WRONG[case]
    with pytest.raises(OwnershipError, match=message):
        require_partition("wrong", Given(ranks), [SPEC], World({"dp": 2}))


def test_complete_peers_pass():
    """Replicas, parts, and a part that is empty."""
    for ranks in (
        ([piece(SPEC.shard({}), 0)], [piece(SPEC.shard({}), 1)]),
        ([piece(ROWS[0], 0, dim=0)], [piece(ROWS[1], 1, dim=0)]),
        ([piece(SPEC.shard({}), 0, dim=0)], [piece(SPEC.part(((4, 0), (0, 8))), 1, dim=0)]),
    ):
        require_partition("right", Given(ranks), [SPEC], World({"dp": 2}))


def test_peers_of_one_rank_need_no_process_group():
    """One process alone runs the strategy that many run."""
    layout = Given(([piece(SPEC.shard({}), 0, dim=0, size=1)],))
    assert make_peer_groups([layout], {}, ProcessGroupCollection()) == {}


class Seen(torch.optim.SGD):
    """Notes the peers that it is told of."""

    infos: list[ParamInfo] = []  # noqa: RUF012 - one list for the test

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Note them, and step."""
        self.infos.extend(param.param_info for group in self.param_groups for param in group["params"])
        super().step(closure)


class Careless(ShardingStrategy):
    """Replicates; `change` alters what it attaches."""

    name = "careless"
    granularities = frozenset(Granularity)

    def __init__(self, change: Callable[[ShardedParams], object] | None = None) -> None:
        self.change = change or (lambda sharded: None)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> Given:
        """Return whole pieces, each with one peer: itself."""
        pieces = [PieceSpec.of(spec.shard({}), spec.group, peers=Peers("dp", 1, 0, dim=0)) for spec in specs]
        return Given((pieces,))

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return the parameters, changed."""
        made = get_registry().strategy("replicated").attach(layout, model, pgs, groups, is_expert=is_expert)
        self.change(made)
        return made


class Plugin:
    """The strategy, and an optimizer whose ranks may have parts."""

    megaopt_api = "1"

    def __init__(self, strategy: ShardingStrategy) -> None:
        self.strategy = strategy

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        """Return the strategy."""
        return {"careless": self.strategy}

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return the optimizer."""
        return {"seen": OptimizerEntry(Seen, supports_peers=True)}


def test_one_process_steps_what_has_peers_elsewhere():
    """Its only part is all of the tensor, and `param_info` names no group to wait for."""
    Seen.infos.clear()
    with temporary_plugin(Plugin(Careless())):
        model = torch.nn.Linear(3, 2)
        before = model.weight.detach().clone()
        optimizer = build_optimizer(
            model, "seen", lr=0.5, clip_grad=0.0, weight_decay=0.0, sharding="careless"
        )
        model.weight.grad = torch.ones(2, 3)
        optimizer.step()
        assert torch.equal(model.weight, before - 0.5)
        assert {info.peers for info in Seen.infos} == {None}


def flattened(sharded: ShardedParams) -> None:
    """Attach a tensor of another shape than the layout says."""
    whole = sharded.pieces[0]
    sharded.pieces[0] = Piece(whole.spec, torch.nn.Parameter(torch.zeros(6)), whole.model_params)


CARELESS = {
    "forgets a piece": (lambda sharded: sharded.pieces.pop(), "does not attach the pieces .* 1 differ"),
    "attaches one twice": (
        lambda sharded: sharded.pieces.append(sharded.pieces[0]),
        "attaches more than the pieces .* 1 differ",
    ),
    "attaches another shape": (flattened, r"a tensor of shape \(2, 3\) .* attaches the shape \(6,\)"),
}


@pytest.mark.parametrize("case", CARELESS)
def test_what_is_attached_is_what_was_laid_out(case):
    """Elements that the layout gives a rank, and that its strategy does not bring to life, would never be stepped."""
    change, message = CARELESS[case]
    with (
        temporary_plugin(Plugin(Careless(change))),
        pytest.raises(
            ShardingError, match=f"sharding='careless' {message}" if "differ" in message else message
        ),
    ):
        build_optimizer(torch.nn.Linear(3, 2, bias=False), "seen", lr=0.5, overrides={}, sharding="careless")


def test_gradients_that_are_scattered_to_other_ranks_are_not_stepped():
    """Of a wrapped model's buffers a rank has reduced gradients in its own share alone."""
    with temporary_plugin(Plugin(Careless())):
        config = OptimizerConfig(optimizer="seen", lr=0.1, sharding="careless")
        routing = route(config, torch.nn.Linear(8, 16, bias=False), {})
    specs = [entry.spec for entry in routing.params.values()]
    layouts = pytest.importorskip("megaopt_distributed.buffers.buffer_layout")
    buffers = layouts.lay_out_buffers(specs, World({"dp": 2}), LayoutOptions())
    second = evolve(routing, axes={"dp": 2}, rank={"dp": 1})
    (spec,) = specs

    def fault(shard):
        return reduced_elsewhere({"careless": Given(([], [PieceSpec.of(shard, 0)]))}, second, buffers)

    assert fault(spec.part(((8, 0), (8, 8)))) is None
    assert fault(spec.shard({}, 64, 128)) is None
    for shard in (spec.shard({}), spec.part(((7, 0), (9, 8))), spec.shard({}, 0, 64)):
        error = fault(shard)
        assert "'careless' steps elements of 'weight' on a rank whose gradients" in str(error)
        assert "use_distributed_optimizer=False" in str(error)
    assert (
        reduced_elsewhere({"careless": Given(([], [PieceSpec.of(spec.shard({}), 0)]))}, second, None) is None
    )


def test_each_piece_counts_by_its_own_peers():
    """Of one parameter a rank may have a piece that it counts, and a replica that its peer counts."""
    grads = [torch.ones(2, 8), torch.full((2, 8), 2.0)]
    param = torch.nn.Parameter(torch.zeros(4, 8))
    specs = [PieceSpec.of(ROWS[0], 0), piece(ROWS[1], 1)]
    pieces = [Piece(spec, torch.zeros(2, 8), (param,)) for spec in specs]
    part = OptimizerPart(
        inner=SimpleNamespace(defaults={}),
        precision=SimpleNamespace(grad=lambda index: grads[index]),
        sharded=SimpleNamespace(pieces=pieces),
        stepped=[],
        groups=[],
        config=None,
        counting={"w": Counting(norm_group="mine")},
    )
    assert list(part.counted_grads()) == [("mine", grads[0])]
    assert list(part.uncounted_grads()) == [grads[1]]


def test_what_is_attached_has_all_of_the_protocol() -> None:
    """The error names what is lacking, and what to inherit from."""
    with pytest.raises(PluginError, match=r"lacks stats_group, exchange, collect_grads, .* inherit from"):
        require_sharded_params(SimpleNamespace(pieces=()), "mine")


def test_defaults_of_the_protocol() -> None:
    """A strategy has no buffers, and what it attaches takes nothing in later, unless it says how."""

    class Attached(ShardedParams):
        def collect_grads(self) -> None: ...
        def take_model_values(self) -> None: ...
        def start_param_sync(self) -> None: ...
        def finish_param_sync(self) -> None: ...

    class Plain(ShardingStrategy):
        name = "plain"

        def layout(self, *_: object) -> ParamLayout: ...
        def attach(self, *_: object, **__: object) -> ShardedParams: ...

    assert Plain().buffers([SPEC], World({"dp": 2}), LayoutOptions()) is None
    with pytest.raises(ShardingError, match="Attached takes in no parameter after the build"):
        Attached().take_in(piece(SPEC.shard({}), 0))
