"""Offloaded training has the bits of training in place; here from "cpu" to "cpu", by the code that CUDA runs."""

import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaopt_device.placement import Copies, nearest_share
from megaopt_testing import temporary_plugin
from megaopt_testing.exchange import SelfExchangeStrategy
from torch import nn

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import (
    ConfigurationError,
    OwnershipError,
    UnsupportedOperationError,
    UnsupportedSettingError,
    UnusedSettingWarning,
)

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning"),
]

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "main": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
}
OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "muon", "adaptive_muon", "soap")
STEPS = 4


class ByShape(torch.optim.Optimizer):
    """Whole tensors, momentum in a list, state made by the first step, and a count of steps in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["factors"] = [param.grad.clone(), {"inner": torch.ones_like(param)}]
                momentum, second = state["factors"]
                momentum.lerp_(param.grad, 0.1)
                second["inner"].mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                param.sub_(momentum / (1.0 + second["inner"].sqrt()), alpha=group["lr"] / group["steps"])


class Together(torch.optim.SGD):
    """Steps a group as one."""


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "by_shape": OptimizerEntry(ByShape, granularity="tensor"),
            "together": OptimizerEntry(Together, granularity="group"),
        }

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, Any]:
        return {"self_exchange": SelfExchangeStrategy(optimizers={"muon", "adaptive_muon"})}


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    with temporary_plugin(Plugin(), "offloaded"):
        yield


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 8)]
    return nn.Sequential(*layers).to(dtype)


def _train(model: nn.Module, optimizer: Any, first: int = 0, steps: int = STEPS) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 16, generator=generator).to(dtype)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _built(name: str, **settings: Any) -> tuple[nn.Module, Any]:
    model = _model(torch.bfloat16 if settings.get("bf16") else torch.float32)
    return model, build_optimizer(model, name, lr=0.01, weight_decay=0.1, clip_grad=0.5, **settings)


def _everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Every value of model, state and groups, by name."""
    found: dict[str, Any] = dict(model.state_dict())
    for param, name in optimizer.names.items():
        found.update({f"{name}.{key}": value for key, value in optimizer.state[param].items()})
    return found | {f"group{index}": group["lr"] for index, group in enumerate(optimizer.param_groups)}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not _same(value, other[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, (list, tuple)):
        return all(map(_same, one, other))
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "by_shape"])
def test_offloaded_steps_have_the_same_bits(name, precision, fraction, overlap) -> None:
    """Every optimizer under every policy: values, states, groups."""
    model, optimizer = _built(name, **PRECISIONS[precision])
    _train(model, optimizer)
    settings = {**OFFLOAD, "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
    placed_model, placed = _built(name, **PRECISIONS[precision], **settings)
    _train(placed_model, placed)
    assert _differing(_everything(model, optimizer), _everything(placed_model, placed)) == []


@pytest.mark.parametrize("name", ["adam", "muon", "soap", "by_shape"])
def test_states_travel_in_several_chunks(name, monkeypatch) -> None:
    """Chunks of one piece each make the same step, whose counts in groups go up by one."""
    model, optimizer = _built(name)
    _train(model, optimizer)
    for module in ("step_on_cpu", "state_on_cpu"):
        monkeypatch.setattr(f"megaopt_device.placement.{module}.CHUNK_BYTES", 1)
    placed_model, placed = _built(name, **OFFLOAD, overlap_cpu_optimizer_d2h_h2d=True)
    turns = []
    for part in placed.parts:
        step = part.inner.step
        part.inner.step = lambda *given, step=step: turns.append(1) or step(*given)
    _train(placed_model, placed)
    assert len(turns) == STEPS * len(list(model.parameters()))
    assert _differing(_everything(model, optimizer), _everything(placed_model, placed)) == []


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_split_steps_are_placed_but_for_their_transform(name, precision) -> None:
    """First and third part on the CPU, the same bits as in place."""
    model, optimizer = _built(name, sharding="self_exchange", **PRECISIONS[precision])
    _train(model, optimizer)
    placed_model, placed = _built(name, sharding="self_exchange", **PRECISIONS[precision], **OFFLOAD)
    _train(placed_model, placed)
    assert _differing(_everything(model, optimizer), _everything(placed_model, placed)) == []
    assert {part.split is None for part in placed.parts} == {True, False}
    assert "CPU, but for what whole tensors are needed for" in str(placed.report(full=True))


@pytest.mark.parametrize("name", ["adam", "muon", "soap", "by_shape"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("before", "after"), [({}, OFFLOAD), (OFFLOAD, {}), (OFFLOAD, OFFLOAD)])
def test_checkpoints_do_not_know_of_it(name, precision, before, after) -> None:
    """A run goes on where another stopped, offloaded or not, as if it had never stopped."""
    model, optimizer = _built(name, **PRECISIONS[precision])
    _train(model, optimizer, steps=6)
    first_model, first = _built(name, **PRECISIONS[precision], **before)
    _train(first_model, first, steps=3)
    second_model, second = _built(name, **PRECISIONS[precision], **after)
    second_model.load_state_dict(first_model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _train(second_model, second, first=3, steps=3)
    assert _differing(_everything(model, optimizer), _everything(second_model, second)) == []


def test_values_that_somebody_else_writes_reach_the_cpu() -> None:
    """A reset between two steps is taken over, as it is in place."""
    results = []
    for settings in ({}, OFFLOAD):
        model, optimizer = _built("adam", **settings)
        _train(model, optimizer, steps=2)
        with torch.no_grad():
            model[0].weight.fill_(0.25)
        _train(model, optimizer, first=2, steps=2)
        results.append(_everything(model, optimizer))
    assert _differing(*results) == []


def test_what_is_placed_has_memory_of_its_own() -> None:
    """Step on the CPU: values, gradients and states are not the model's; state on the CPU: the step is the model's."""
    model, optimizer = _built("muon", **OFFLOAD)
    _train(model, optimizer)
    muon, adam = optimizer.parts
    assert {piece.param is piece.model_params[0] for piece in muon.pieces} == {True}
    assert {piece.param is piece.model_params[0] for piece in adam.pieces} == {False}


def test_the_report_says_what_lies_where() -> None:
    """The nearest share of bytes, whole pieces, largest first."""
    _, optimizer = _built("adam", **{**OFFLOAD, "optimizer_offload_fraction": 0.5})
    placed = {row.name: row.place for row in optimizer.report().params if row.place}
    # 576 + 24 + 24 + 8 of 1256 elements; the next piece of 24 would be farther from a half.
    assert placed == dict.fromkeys(["0.bias", "1.weight", "2.weight", "4.bias"], "CPU")
    assert _built("muon", **OFFLOAD)[1].report().params[0].place == "states on the CPU"
    assert not any(row.place for row in _built("adam")[1].report().params)


@pytest.mark.parametrize(
    ("sizes", "fraction", "expected"),
    [
        ([100, 300, 200], 1.0, [0, 1, 2]),
        ([100, 300, 200], 0.5, [1]),
        ([100, 300, 200], 0.05, []),
        ([100, 300, 200], 0.2, [2]),
        ([100, 300, 200], 0.25, [1]),
        ([8], 0.49, []),
        ([8], 0.5, [0]),
        ([5, 5, 5, 5], 0.5, [0, 1]),
        ([], 1.0, []),
    ],
)
def test_the_share_is_made_of_whole_pieces_largest_first(sizes, fraction, expected) -> None:
    """Each is taken if that comes nearer."""
    assert sorted(nearest_share(sizes, fraction)) == expected


@pytest.mark.parametrize("seed", range(60))
def test_every_share_is_met_as_near_as_whole_pieces_come(seed) -> None:
    """Of any sizes: bytes are missed by at most half a piece that was left or taken, and more never means fewer."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret
    sizes = [
        chance.choice((1, 3, 8, 64, 1000, 4096)) * chance.randint(1, 9) for _ in range(chance.randint(1, 20))
    ]
    shares = sorted(chance.random() for _ in range(8))
    taken_before = -1
    for share in (0.0, *shares, 1.0):
        chosen = nearest_share(sizes, share)
        taken, wanted = sum(sizes[index] for index in chosen), share * sum(sizes)
        assert taken >= taken_before
        assert abs(taken - wanted) <= max(sizes) / 2
        for index in set(range(len(sizes))) - chosen:  # largest first: what was left would have gone too far
            larger = sum(sizes[each] for each in chosen if (-sizes[each], each) < (-sizes[index], index))
            assert larger + sizes[index] / 2 > wanted
        taken_before = taken
    assert nearest_share(sizes, 0.0) == frozenset()
    assert nearest_share(sizes, 1.0) == frozenset(range(len(sizes)))


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.55, 0.8, 1.0])
@pytest.mark.parametrize("name", ["adam", "muon", "lion"])
def test_the_column_of_the_report_is_what_was_placed(name, fraction) -> None:
    """Whole parameters of each inner optimizer, as near to the share as they come."""
    _, optimizer = _built(name, **{**OFFLOAD, "optimizer_offload_fraction": fraction})
    rows = {row.name: row for row in optimizer.report().params}
    for part in optimizer.parts:
        names = [piece.spec.members[0][1].name for piece in part.pieces]
        sizes = [piece.param.numel() * piece.param.element_size() for piece in part.pieces]
        expected = {names[index] for index in nearest_share(sizes, fraction)}
        assert {each for each in names if rows[each].place} == expected


@pytest.mark.parametrize("name", ["muon", "by_shape"])
@pytest.mark.parametrize("overlap", [False, True])
def test_memory_for_states_is_used_again(name, overlap, monkeypatch) -> None:
    """Also by states that are stored anew in every step: nothing piles up."""
    monkeypatch.setattr("megaopt_device.placement.state_on_cpu.CHUNK_BYTES", 1)
    made: list[int] = []
    real = Copies.memory_like
    monkeypatch.setattr(
        Copies, "memory_like", lambda self, tensor, **how: made.append(1) or real(self, tensor, **how)
    )
    narrow = {"muon_momentum_dtype": "uint8"} if name == "muon" else {}
    model, optimizer = _built(
        name, **PRECISIONS["remainders"], **narrow, **OFFLOAD, overlap_cpu_optimizer_d2h_h2d=overlap
    )
    _train(model, optimizer, steps=2)
    before = len(made)
    _train(model, optimizer, first=2, steps=5)
    assert len(made) == before


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_hundred_steps_on_the_cpu_do_not_diverge(fraction) -> None:
    """Not by a bit: what is stepped there is neither flattened nor cast on the way."""
    for name in ("adam", "sgd", "muon"):
        model, optimizer = _built(name)
        _train(model, optimizer, steps=100)
        settings = {**OFFLOAD, "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": True}
        placed_model, placed = _built(name, **settings)
        _train(placed_model, placed, steps=100)
        assert _differing(_everything(model, optimizer), _everything(placed_model, placed)) == []


@pytest.mark.parametrize("name", [*OPTIMIZERS, "by_shape", "together"])
def test_no_optimizer_becomes_another_one(name) -> None:
    """Offloaded, every part has the class, and steps by the method, that it has in place."""
    _, optimizer = _built(name)
    _, placed = _built(name, **OFFLOAD)
    for one, other in zip(optimizer.parts, placed.parts, strict=True):
        assert type(one.inner) is type(other.inner)
        assert one.inner.defaults == other.inner.defaults
    assert [row.optimizer for row in optimizer.report().params] == [
        row.optimizer for row in placed.report().params
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_cpu_offload": True}, "optimizer_offload_fraction=0.0 of the states, which is nothing"),
        ({"optimizer_offload_fraction": 1.5}, "must be a number from 0 to 1"),
        ({**OFFLOAD, "optimizer_cuda_graph": True}, "gives a part of the step to the CPU; choose one"),
    ],
)
def test_settings_that_contradict_each_other_raise_at_construction(settings, message) -> None:
    """Before anything is built."""
    with pytest.raises(ConfigurationError, match=message):
        _built("adam", **settings)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (OFFLOAD, "optimizer_cpu_offload=True: the model is on 'cpu' already"),
        (
            {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True},
            "overlap_cpu_optimizer_d2h_h2d=True: the model is on",
        ),
        ({**OFFLOAD, "pin_cpu_grads": False}, "pin_cpu_grads=False: the model is on 'cpu'"),
        (
            {"optimizer_offload_fraction": 0.5},
            "optimizer_offload_fraction=0.5: optimizer_cpu_offload is False",
        ),
        ({"pin_cpu_params": False}, "pin_cpu_params=False: optimizer_cpu_offload is False"),
        (
            {"overlap_cpu_optimizer_d2h_h2d": True},
            "overlap_cpu_optimizer_d2h_h2d=True: optimizer_cpu_offload is False",
        ),
        (
            {**OFFLOAD, "optimizer_offload_fraction": 0.001},
            "no set of whole pieces comes nearer to 0.001 than none",
        ),
    ],
)
def test_what_cannot_take_effect_is_named_once(settings, named) -> None:
    """With the reason, in a warning and in the report."""
    with pytest.warns(UnusedSettingWarning) as caught:
        _, optimizer = _built("adam", **settings)
    assert len(caught) == 1
    assert named in str(caught[0].message)
    assert any(named in sentence for sentence in optimizer.report().unused_settings)


def test_a_group_that_is_stepped_as_one_is_offloaded_as_one() -> None:
    """All of it, or an error that says why."""
    with pytest.raises(UnsupportedSettingError, match="'together' steps a group of parameters as one"):
        _built("together", **{**OFFLOAD, "optimizer_offload_fraction": 0.5})
    model, optimizer = _built("together")
    _train(model, optimizer)
    placed_model, placed = _built("together", **OFFLOAD)
    _train(placed_model, placed)
    assert _differing(_everything(model, optimizer), _everything(placed_model, placed)) == []


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_torchs_class_is_really_chosen(name, monkeypatch) -> None:
    """It makes the steps on the CPU, and only those; the report names it."""
    model, optimizer = _built(name)
    _train(model, optimizer)
    made: list[int] = []
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    settings = {**OFFLOAD, "optimizer_offload_fraction": 0.5, "use_torch_optimizer_for_cpu_offload": True}
    placed_model, placed = _built(name, **settings)
    (step,) = [placed.parts[0].runner._chosen(placed.parts[0])]
    assert type(step._torch) is cls
    original = step._torch.step
    step._torch.step = lambda: made.append(len(step._torch.param_groups[0]["params"])) or original()
    _train(placed_model, placed)
    assert made == [1] * STEPS
    assert _differing(_everything(model, optimizer), _everything(placed_model, placed)) == []
    assert f"CPU, by torch.optim.{cls.__name__}" in str(placed.report(full=True))


def test_torchs_class_is_refused_where_it_would_step_otherwise() -> None:
    """Lion has none, which is named; cautious decay is nothing that torch's Adam knows."""
    asked = {**OFFLOAD, "use_torch_optimizer_for_cpu_offload": True}
    with pytest.warns(UnusedSettingWarning, match="torch has no class that steps as 'lion' does"):
        _built("lion", **asked)
    with pytest.raises(UnsupportedSettingError, match=r"torch\.optim\.Adam knows no cautious_weight_decay"):
        _built("adam", cautious_weight_decay=True, **asked)


def test_torchs_class_is_named_where_only_whole_tensors_are_stepped() -> None:
    """They are stepped on the device, where the setting says nothing."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with pytest.warns(
        UnusedSettingWarning,
        match="use_torch_optimizer_for_cpu_offload=True: 'by_shape' steps whole tensors, on the device",
    ):
        build_optimizer(model, "by_shape", lr=0.1, **OFFLOAD, use_torch_optimizer_for_cpu_offload=True)


def test_a_parameter_that_begins_to_train_later_is_refused() -> None:
    """What lies where is decided at the build; nothing is left unstepped in silence."""
    model = _model()
    model[4].bias.requires_grad_(False)
    optimizer = build_optimizer(model, "adam", lr=0.01, **OFFLOAD)
    _train(model, optimizer, steps=1)
    model[4].bias.requires_grad_(True)
    with pytest.raises(
        OwnershipError, match="optimizer_cpu_offload=True decides the place of each parameter at the build"
    ):
        _train(model, optimizer, steps=1)


@pytest.mark.parametrize("offload", [{}, OFFLOAD], ids=["in place", "offloaded"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["adam", "muon", "soap", "by_shape"])
def test_states_leave_between_phases_and_come_back(name, precision, offload) -> None:
    """Saving works meanwhile, a step is refused, and training goes on with the same bits."""
    model, optimizer = _built(name, **PRECISIONS[precision])
    _train(model, optimizer, steps=4)
    moved_model, moved = _built(name, **PRECISIONS[precision], **offload)
    _train(moved_model, moved, steps=2)
    before = copy.deepcopy(_everything(moved_model, moved))
    addresses = {id(param): _addresses(moved, param) for param in moved.names}
    moved.offload_to_cpu()
    moved.offload_to_cpu()
    assert _differing(before, _everything(moved_model, moved)) == []
    assert all(addresses[id(param)].isdisjoint(_addresses(moved, param)) for param in moved.names)
    with pytest.raises(UnsupportedOperationError, match="call restore_from_cpu"):
        _train(moved_model, moved, steps=1)
    moved.restore_from_cpu()
    moved.restore_from_cpu()
    _train(moved_model, moved, first=2, steps=2)
    assert _differing(_everything(model, optimizer), _everything(moved_model, moved)) == []


class DeclaringPlugin:
    """Registers torch's Adam as an optimizer of whole tensors, which declares its state."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return the entry."""
        state = {"step": "scalar", "exp_avg": "param", "exp_avg_sq": "param"}
        return {"declaring": OptimizerEntry(torch.optim.Adam, granularity="tensor", state=state)}


def test_declared_state_is_made_where_it_lies() -> None:
    """Training is the same, and so is the state before the first step."""
    models = []
    with temporary_plugin(DeclaringPlugin(), "declaring"):
        for settings in ({}, OFFLOAD):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            optimizer = build_optimizer(model, "declaring", lr=0.1, overrides={}, **settings)
            for param in optimizer.names:
                state = optimizer.state[param]
                assert {key: state[key].shape for key in state} == {
                    "step": (),
                    "exp_avg": param.shape,
                    "exp_avg_sq": param.shape,
                }
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=generator)
                optimizer.step()
            models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


class Modal(torch.optim.SGD):
    """SGD with modes, as schedule-free methods have them."""

    def eval(self) -> None:
        """Leave training."""
        self.param_groups[0]["train_mode"] = False


class ModalPlugin:
    """Registers it."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return the entry."""
        return {"modal": OptimizerEntry(Modal)}


def test_a_mode_is_refused_while_states_are_on_the_cpu() -> None:
    """The mode works on them; afterwards it goes on, and optimizers without modes refuse nothing."""
    with temporary_plugin(ModalPlugin(), "modal"):
        optimizer = build_optimizer(nn.Linear(4, 2), "modal", lr=0.1)
    optimizer.offload_to_cpu()
    with pytest.raises(
        UnsupportedOperationError,
        match=r"eval\(\) after offload_to_cpu\(\) is not possible: call restore_from_cpu",
    ):
        optimizer.eval()
    assert "train_mode" not in optimizer.param_groups[0]
    optimizer.restore_from_cpu()
    optimizer.eval()
    assert optimizer.param_groups[0]["train_mode"] is False
    plain = build_optimizer(nn.Linear(4, 2), "sgd", lr=0.1)
    plain.offload_to_cpu()
    plain.eval()


def _addresses(optimizer: Any, param: torch.Tensor) -> set[int]:
    """Where the inner optimizer's state tensors of one parameter lie."""
    for part in optimizer.parts:
        for piece, tensor in zip(part.pieces, part.stepped, strict=True):
            if piece.model_params[0] is param:
                return {
                    value.data_ptr()
                    for value in part.inner.state[tensor].values()
                    if isinstance(value, torch.Tensor)
                }
    raise AssertionError(param)


def test_copies_go_both_ways() -> None:
    """From "cpu" to "cpu" they are copies, in memory of the same strides."""
    copies = Copies(torch.device("cpu"), overlap=True)
    source = torch.arange(6.0).view(2, 3).t()
    memory = copies.memory_like(source, pinned=True)
    copies.down(memory, source)
    copies.wait_down()
    back = torch.empty_like(source)
    copies.up(back, memory)
    copies.wait_up()
    assert torch.equal(back, source)
    assert memory.stride() == source.stride()


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_parameters_on_several_devices_are_refused(name) -> None:
    """Copies are ordered for one device; the message names all of them."""
    (part, *_) = build_optimizer(_model(), name, lr=0.01, **OFFLOAD).parts
    params = [nn.Parameter(torch.zeros(2, 2, device=device)) for device in ("meta", "cpu", "cpu")]
    sharded: Any = SimpleNamespace(
        pieces=[SimpleNamespace(param=param, model_params=(param,)) for param in params], exchange=None
    )
    with pytest.raises(
        UnsupportedSettingError,
        match=f"True: the parameters of {name!r} are on cpu and meta, and copies to the CPU are ordered for one",
    ):
        part.runner.place(sharded)
