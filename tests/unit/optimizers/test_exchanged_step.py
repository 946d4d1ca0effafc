"""Steps in three parts over an exchange: the same bits as whole steps, under every precision policy."""

import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megaopt_testing.exchange import SelfExchange, SelfExchangeStrategy
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import Granularity, OptimizerEntry, ParamKey, build_optimizer, hookimpl
from megaopt_core.errors import PluginError, ShardingError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python


class Normalized(torch.optim.Optimizer):
    """Momentum that is divided by its norm; counts its steps in the group."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        split = NormalizedSplit(self)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        split.apply(params, split.transform(split.local_updates(params), [None] * len(params)))


class NormalizedSplit:
    def __init__(self, inner: Normalized) -> None:
        self.inner = inner

    def _groups(self, params: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        groups = {id(param): group for group in self.inner.param_groups for param in group["params"]}
        return [(param, groups[id(param)]) for param in params]

    def init_state(self, params: Any) -> None:
        for param in params:
            self.inner.state[param].setdefault("exp_avg", torch.zeros_like(param))

    def local_updates(self, params: Any) -> list[torch.Tensor]:
        self.init_state(params)
        for group in self.inner.param_groups:
            group["steps"] += 1
        updates = []
        for param, group in self._groups(params):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            momentum = self.inner.state[param]["exp_avg"]
            updates.append(momentum.lerp_(param.grad, 1 - group["beta"]))
        return updates

    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        return [update / update.norm().clamp_min(1e-12) for update in updates]

    def apply(self, params: Any, updates: Any) -> None:
        for (param, group), update in zip(self._groups(params), updates, strict=True):
            param.sub_(update.to(param.dtype), alpha=group["lr"])


class Remembering(Normalized):
    """Also divides by what it remembers of whole updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        split = NormalizedSplit(self)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = split.transform(split.local_updates(params), [None] * len(params))
        for param, update in zip(params, updates, strict=True):
            _remember(self.state[param], update)
        split.apply(params, updates)


def _remember(state: dict[str, Any], update: torch.Tensor) -> None:
    second = state.setdefault("second", torch.zeros_like(update))
    largest = state.setdefault("largest", torch.zeros(3))
    second.mul_(0.9).addcmul_(update, update, value=0.1)
    largest.copy_(torch.maximum(largest, update.abs().max().expand(3)))
    update.div_(second.sqrt().add_(largest[0] + 1e-3))


class RememberingSplit(NormalizedSplit):
    transform_keys = frozenset({"second", "largest"})

    def __init__(self, inner: Normalized) -> None:
        super().__init__(inner)
        self.transform_state: dict[str, dict[str, Any]] = {}

    def init_transform_state(self, updates: Any, infos: Any) -> None:
        for update, info in zip(updates, infos, strict=True):
            self.transform_state[info.name] = {"second": torch.zeros_like(update), "largest": torch.zeros(3)}

    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        done = super().transform(updates, infos)
        for update, info in zip(done, infos, strict=True):
            _remember(self.transform_state.setdefault(info.name, {}), update)
        return done


class TakesNotes(NormalizedSplit):
    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        for info in infos:
            group = self.inner.param_groups[info.group]
            group["seen"] = f"{group.get('seen', '')} {info.name}"
        return super().transform(updates, infos)


class OfWrongShape(NormalizedSplit):
    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        return [update.view(-1) for update in updates]


MOMENT = {"exp_avg": frozenset({torch.float32, torch.bfloat16, torch.float16})}


def _entry(optimizer_cls: type[torch.optim.Optimizer] = Normalized, **fields: Any) -> OptimizerEntry:
    given = {"granularity": Granularity.TENSOR, "state_dtypes": MOMENT, "split_step": NormalizedSplit}
    return OptimizerEntry(optimizer_cls, **{**given, **fields})


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "normalized": _entry(),
            "remembering": _entry(Remembering, split_step=RememberingSplit),
            "takes_notes": _entry(split_step=TakesNotes),
            "of_wrong_shape": _entry(split_step=OfWrongShape),
            "only_whole": _entry(split_step=None),
            "refusing": _entry(refuses_split=lambda config: "not with this configuration"),
        }

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, Any]:
        names = {"normalized", "remembering", "takes_notes", "of_wrong_shape", "only_whole", "refusing"}
        return {"self_exchange": SelfExchangeStrategy(optimizers=names)}


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register the optimizers and the strategy."""
    with temporary_plugin(Plugin(), "splitting"):
        yield


POLICIES = {
    "fp32": (torch.float32, {}),
    "bf16 in place": (torch.bfloat16, {}),
    "main": (torch.bfloat16, {"bf16": True}),
    "remainders": (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
    "narrow main": (
        torch.bfloat16,
        {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "main_params_dtype": torch.bfloat16,
            "exp_avg_dtype": torch.float16,
        },
    ),
}


def _pair(
    mlp: Callable[..., nn.Module], policy: str, name: str = "normalized", **settings: Any
) -> list[tuple[nn.Module, Any]]:
    """Return a model with an optimizer that steps whole, and the same with one that splits."""
    dtype, precision = POLICIES[policy]
    made = []
    for sharding in ("replicated", "self_exchange"):
        model = mlp(dtype)
        given = {"lr": 0.1, "weight_decay": 0.01, "clip_grad": 0.0, "sharding": sharding}
        made.append((model, build_optimizer(model, name, **{**given, **precision, **settings})))
    assert made[1][1].parts[0].split is not None
    return made


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["normalized", "remembering"])
def test_split_steps_are_whole_steps(mlp, give, snapshot, policy: str, name: str) -> None:
    """Bit for bit, with clipping, parameters without gradients, and learning rates that change."""
    pair = _pair(mlp, policy, name, clip_grad=0.5, overrides={ParamKey(name="0.*"): {"beta": 0.5}})
    for step in range(5):
        for model, optimizer in pair:
            give(model, step)
            if step % 2:
                model[0].bias.grad = None
                model[2].weight.grad = None
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            assert optimizer.step().update_successful
    (model, whole), (other, split) = pair
    assert snapshot(model, whole) == snapshot(other, split)
    assert {group["steps"] for group in split.param_groups} == {5}


def test_settings_that_the_middle_part_writes_stay(mlp, give) -> None:
    """What each bucket adds to its group is there after the step; the count of steps is one all the same."""
    (_, _), (model, optimizer) = _pair(mlp, "fp32", "takes_notes")
    give(model)
    optimizer.step()
    assert sorted(" ".join(group["seen"] for group in optimizer.param_groups).split()) == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    ]
    assert {group["steps"] for group in optimizer.param_groups} == {1}


def test_a_bucket_travels_while_the_one_before_is_transformed(mlp, give) -> None:
    """The order of calls is the same whatever has a gradient, and no bucket is begun before it has to be."""
    (_, _), (model, optimizer) = _pair(mlp, "fp32")
    exchange = optimizer.parts[0].sharded.exchange
    orders = []
    for step in range(2):
        give(model, step)
        if step:
            model[0].weight.grad = None
        exchange.calls.clear()
        optimizer.step()
        orders.append(list(exchange.calls))
    assert orders[0] == orders[1]
    assert orders[0][:6] == [
        ("start_to_owners", 0),
        ("start_to_owners", 1),
        ("finish_to_owners", 0),
        ("start_back", 0),
        ("finish_back", 0),
        ("start_to_owners", 2),
    ]
    assert len(orders[0]) == 4 * len(exchange.buckets)


def test_updates_of_two_buckets_are_in_memory_at_most(give, monkeypatch) -> None:
    """The step itself keeps none alive."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    optimizer = build_optimizer(model, "normalized", lr=0.1, sharding="self_exchange")
    alive: list[tuple[int, weakref.ref]] = []
    most = 0

    def watch(name: str, tensors_of: Any) -> None:
        inside = getattr(SelfExchange, name)

        def call(self: SelfExchange, bucket: int, *args: Any) -> Any:
            nonlocal most
            result = inside(self, bucket, *args)
            found = tensors_of(result, *args)
            alive.extend((bucket, weakref.ref(tensor)) for tensor in found)
            most = max(most, len({number for number, ref in alive if ref() is not None}))
            return result

        monkeypatch.setattr(SelfExchange, name, call)

    watch("finish_to_owners", lambda result: [update for _, update in result])
    watch("start_back", lambda _, transformed: transformed)
    watch("finish_back", lambda result: [update for update in result if update is not None])
    give(model)
    optimizer.step()
    assert most == 1
    assert not any(ref() is not None for _, ref in alive)


def test_a_step_that_is_given_up_changes_nothing(mlp, give, snapshot) -> None:
    """Non-finite gradients in mixed precision."""
    (_, _), (model, optimizer) = _pair(mlp, "main", "remembering")
    give(model)
    optimizer.step()
    before = snapshot(model, optimizer)
    give(model, 1)
    model[0].weight.grad[0, 0] = float("inf")
    assert not optimizer.step().update_successful
    assert snapshot(model, optimizer) == before


def test_state_is_there_before_the_first_step(mlp) -> None:
    """Of slices and of what owners keep, under the keys that a step leaves."""
    (_, _), (_, optimizer) = _pair(mlp, "main", "remembering")
    for state in optimizer.state.values():
        assert set(state) == {"exp_avg", "second", "largest", "main_param"}
        assert state["exp_avg"].abs().sum() == state["second"].abs().sum() == 0


def _through_files(
    tmp_path: Path, one: tuple[nn.Module, MegatronOptimizer], two: tuple[nn.Module, MegatronOptimizer]
) -> None:
    files = pytest.importorskip("megaopt_checkpoint")
    files.save_checkpoint(tmp_path / "saved", *one)
    files.load_checkpoint(tmp_path / "saved", *two)


def _through_state_dicts(
    tmp_path: Path, one: tuple[nn.Module, MegatronOptimizer], two: tuple[nn.Module, MegatronOptimizer]
) -> None:
    saved = io.BytesIO()
    torch.save([part.state_dict() for part in one], saved)
    saved.seek(0)
    for part, state_dict in zip(two, torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state_dict)


def _through_dcp(
    tmp_path: Path, one: tuple[nn.Module, MegatronOptimizer], two: tuple[nn.Module, MegatronOptimizer]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that there is one process only
        where = {"checkpoint_id": tmp_path / "saved", "no_dist": True}
        dcp.save({"model": one[0].state_dict(), "optim": one[1].checkpoint_state()}, **where)
        model = two[0].state_dict()
        dcp.load({"model": model, "optim": two[1].checkpoint_state()}, **where)
        two[0].load_state_dict(model)


@pytest.mark.parametrize("through", [_through_files, _through_state_dicts, _through_dcp])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("policy", ["fp32", "remainders"])
def test_split_and_whole_resume_each_other(
    mlp, give, snapshot, tmp_path, policy: str, steps: int, through
) -> None:
    """State of slices and of whole tensors, in either direction, bit for bit; also before the first step."""
    pairs = [_pair(mlp, policy, "remembering") for _ in range(2)]

    def train(one: Any, numbers: range) -> None:
        for step in numbers:
            give(one[0], step)
            one[1].step()

    for one in pairs[0]:
        train(one, range(steps))
    for number, (one, two) in enumerate(zip(pairs[0], reversed(pairs[1]), strict=True)):
        train(two, range(7, 7 + steps))
        through(tmp_path / str(number), one, two)
        for other in (one, two):
            train(other, range(steps, 4))
        assert snapshot(*one) == snapshot(*two)
    assert snapshot(*pairs[0][0]) == snapshot(*pairs[0][1])


def test_changes_are_recorded(mlp, give) -> None:
    """The report counts what a split step changed."""
    (_, _), (model, optimizer) = _pair(mlp, "remainders")
    give(model)
    optimizer.step()
    (row,) = optimizer.report(after_step=True).parts
    assert (row.changed, row.stepped) == (4, 4)


def test_the_report_shows_what_travels(mlp) -> None:
    """Split or whole, with bytes; nothing where nothing travels."""
    (_, whole), (model, split) = _pair(mlp, "fp32")
    rows = {row.name: row for row in split.report().params}
    assert rows["0.weight"].travels == "split"
    assert rows["0.weight"].bytes == 2 * 4 * model[0].weight.numel()
    assert f"split, {rows['0.weight'].bytes} B" in str(split.report(full=True))
    assert {(row.travels, row.bytes) for row in whole.report().params} == {("", 0)}
    assert "travels" not in str(whole.report(full=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "only_whole",
            "exchanges updates of 'only_whole', which only steps whole tensors: its entry offers no split step",
        ),
        (
            "refusing",
            "exchanges updates of 'refusing', which only steps whole tensors: not with this configuration",
        ),
    ],
)
def test_an_optimizer_that_does_not_split_is_refused(mlp, name: str, message: str) -> None:
    """The reason is in the error."""
    with pytest.raises(ShardingError, match=message):
        build_optimizer(mlp(), name, lr=0.1, sharding="self_exchange")


def test_a_part_that_returns_other_shapes_is_named(mlp, give) -> None:
    """With what it returned and what it must return."""
    (_, _), (model, optimizer) = _pair(mlp, "fp32", "of_wrong_shape")
    give(model)
    with pytest.raises(
        PluginError, match=r"OfWrongShape\.transform returned tensors of the shapes \[\(35,\)"
    ):
        optimizer.step()


@pytest.mark.parametrize("buckets", [[(0, 1)], [(0, 1, 2, 3), (3,)], [(0, 1, 2, 3, 4)]])
def test_buckets_that_do_not_hold_every_piece_once_are_refused(mlp, monkeypatch, buckets) -> None:
    """A piece would be stepped twice, or not at all."""
    monkeypatch.setattr(SelfExchange, "buckets", buckets)
    with pytest.raises(
        ShardingError, match=r"the buckets of an exchange must hold each of the .* pieces once"
    ):
        build_optimizer(mlp(), "normalized", lr=0.1, sharding="self_exchange")


def test_an_owner_without_a_piece_is_refused(mlp, monkeypatch) -> None:
    """State of its own would have no place."""
    inside = SelfExchange.owned.fget
    monkeypatch.setattr(
        SelfExchange, "owned", property(lambda self: [*inside(self), type(self.infos[0])("elsewhere", None)])
    )
    with pytest.raises(ShardingError, match="this rank owns elsewhere, but holds no piece of it"):
        build_optimizer(mlp(), "normalized", lr=0.1, sharding="self_exchange")


def test_an_exchange_that_loses_an_update_is_named(mlp, give, monkeypatch) -> None:
    """A parameter with a gradient gets its update."""
    inside = SelfExchange.finish_back
    monkeypatch.setattr(
        SelfExchange, "finish_back", lambda self, bucket: [None for _ in inside(self, bucket)]
    )
    (_, _), (model, optimizer) = _pair(mlp, "fp32")
    give(model)
    with pytest.raises(
        ShardingError, match=r"finish_back\(0\) must return an update for every piece that sent one"
    ):
        optimizer.step()


class RaisesOnce(NormalizedSplit):
    left = 1

    def transform(self, updates: Any, infos: Any) -> list[torch.Tensor]:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no memory for an update")
        return super().transform(updates, infos)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_was_lent_is_taken_back_where_a_step_raises(mlp, give, policy: str) -> None:
    """Of the bucket that is transformed and of the one that travels; the next step goes on."""
    (_, _), (model, optimizer) = _pair(mlp, policy)
    part = optimizer.parts[0]
    part.split.split = RaisesOnce(part.inner)
    memory = [tensor.untyped_storage().nbytes() for tensor in part.stepped]
    give(model)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert [tensor.untyped_storage().nbytes() for tensor in part.stepped] == memory
    for step in (1, 2):
        give(model, step)
        assert optimizer.step().update_successful
    assert {group["steps"] for group in optimizer.param_groups} <= {2, 3}
