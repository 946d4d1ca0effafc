"""State before the first step: a place to load into, which changes nothing about the steps that follow."""

import importlib
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megaopt_bridge.initial_state import Copies
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import FP32Optimizer, MixedPrecisionOptimizer, OptimizerConfig, build_optimizer
from megaopt_core.errors import StateDictError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

CLASSES = {
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.125}],
    "Adam": [{}, {"amsgrad": True}, {"fused": True}],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}],
    "Adamax": [{}],
    "ASGD": [{}, {"t0": 1.0}],
    "Muon": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "RMSprop": [{"momentum": 0.9, "centered": True}, {}],
    "Rprop": [{}, {"lr": 0.5}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}],
}
WITHOUT_TABLE = {"LBFGS", "Optimizer", "SparseAdam"}  # a closure; the base class; sparse gradients only
TABLE = [
    pytest.param(getattr(torch.optim, name), settings, id=f"{name}-{number}")
    for name, every in CLASSES.items()
    for number, settings in enumerate(every)
]
PECULIAR = [entry for entry in TABLE if entry.id in ("Adam-0", "ASGD-1", "NAdam-1", "Rprop-0", "SGD-2")]
"""Those whose first step begins with something else than zeros, and Adam."""


@pytest.fixture
def mlp() -> Callable[..., nn.Module]:
    """Make a small network whose weights depend on the seed alone."""

    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    return make


@pytest.fixture
def give() -> Callable[[nn.Module], None]:
    """Give every parameter the same random gradient at every call."""

    def grads(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(100)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)

    return grads


def _matrices(seed: int = 0) -> nn.Sequential:
    """Return a model without vectors, which torch's Muon refuses, and with a parameter that gets no gradient."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(3)])


def _give(model: nn.Sequential, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, layer in enumerate(model):
        unused = index == 2 and step < 1
        layer.weight.grad = None if unused else torch.randn(5, 5, generator=generator)


def _wrapped(
    model: nn.Module, cls: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]
) -> FP32Optimizer:
    return FP32Optimizer(cls(model.named_parameters(), **settings), OptimizerConfig(clip_grad=0.0))


def _run(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    if hasattr(optimizer, "train"):
        optimizer.train()
    torch.manual_seed(7)
    for step in steps:
        _give(model, step)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _same(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def test_the_table_has_every_optimizer_of_torch() -> None:
    """A class that torch adds is added here."""
    known = {name for name, found in vars(torch.optim).items() if isinstance(found, type)}
    assert known - WITHOUT_TABLE == set(CLASSES)


@pytest.mark.parametrize(("cls", "settings"), TABLE)
def test_a_wrapped_optimizer_steps_as_it_does_alone(cls, settings) -> None:
    """Bit for bit from the first step on, also for a parameter whose first gradient comes later."""
    ours, theirs = _matrices(), _matrices()
    expected = _run(theirs, cls(theirs.parameters(), **settings), range(3))
    assert _same(_run(ours, _wrapped(ours, cls, settings), range(3)), expected)


@pytest.mark.parametrize("precise", [False, True], ids=["main", "remainders"])
@pytest.mark.parametrize(("cls", "settings"), TABLE)
def test_main_parameters_step_as_fp32_ones_do(cls, settings, precise) -> None:
    """Mixed precision begins where the class begins too."""
    ours, theirs = _matrices().bfloat16(), _matrices().bfloat16().float()
    config = OptimizerConfig(bf16=True, clip_grad=0.0, use_precision_aware_optimizer=precise)
    optimizer = MixedPrecisionOptimizer(cls(ours.named_parameters(), **settings), config)
    plain = cls(theirs.parameters(), **settings)
    for step in range(3):
        _give(theirs, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = None if other.grad is None else other.grad.bfloat16()
            other.grad = None if other.grad is None else other.grad.bfloat16().float()
        optimizer.step()
        plain.step()
    mains = [optimizer.state[param]["main_param"] for param in ours.parameters()]
    assert _same(mains, theirs.parameters())


def _by_state_dict(
    model: nn.Module, first: MegatronOptimizer, resumed: nn.Module, second: MegatronOptimizer, folder: Path
) -> None:
    file = io.BytesIO()
    torch.save((model.state_dict(), first.state_dict()), file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    resumed.load_state_dict(values)
    second.load_state_dict(state)


def _by_checkpoint(
    model: nn.Module, first: MegatronOptimizer, resumed: nn.Module, second: MegatronOptimizer, folder: Path
) -> None:
    files = pytest.importorskip("megaopt_checkpoint")
    files.save_checkpoint(folder / "saved", model=model, optimizer=first)
    files.load_checkpoint(folder / "saved", model=resumed, optimizer=second)


def _by_dcp(
    model: nn.Module, first: MegatronOptimizer, resumed: nn.Module, second: MegatronOptimizer, folder: Path
) -> None:
    dcp.save(
        {"m": model.state_dict(), "o": first.checkpoint_state()}, checkpoint_id=folder / "dcp", no_dist=True
    )
    values = {"m": resumed.state_dict(), "o": second.checkpoint_state()}
    dcp.load(values, checkpoint_id=folder / "dcp", no_dist=True)


def _require_resumed(
    cls: Callable[..., torch.optim.Optimizer],
    settings: Mapping[str, Any],
    saved_after: int,
    loaded_after: int,
    carry: Callable[..., None],
    tmp_path: Path,
) -> None:
    through, cut, resumed = _matrices(), _matrices(), _matrices(3)
    expected = _run(through, _wrapped(through, cls, settings), range(3))
    first, second = _wrapped(cut, cls, settings), _wrapped(resumed, cls, settings)
    _run(cut, first, range(saved_after))
    _run(resumed, second, range(loaded_after))
    carry(cut, first, resumed, second, tmp_path)
    assert _same(_run(resumed, second, range(saved_after, 3)), expected)


@pytest.mark.parametrize("saved_after", [0, 1])
@pytest.mark.parametrize(("cls", "settings"), TABLE)
def test_a_state_dict_from_before_or_after_the_first_step_is_resumed(
    cls, settings, saved_after, tmp_path
) -> None:
    """By a new optimizer and by one that has stepped already."""
    for loaded_after in (0, 1):
        _require_resumed(cls, settings, saved_after, loaded_after, _by_state_dict, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("carry", [_by_checkpoint, _by_dcp])
@pytest.mark.parametrize(("saved_after", "loaded_after"), [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize(("cls", "settings"), PECULIAR)
def test_a_checkpoint_from_before_or_after_the_first_step_is_resumed(
    cls, settings, saved_after, loaded_after, carry, tmp_path
) -> None:
    """Ours, and torch's own functions with our `Stateful`."""
    _require_resumed(cls, settings, saved_after, loaded_after, carry, tmp_path)


class Odd(torch.optim.SGD):
    """Counts in its group, in an attribute and with a generator, cannot step before `train()` or on very little."""

    def __init__(self, params: ParamsT, refuses: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.calls: list[int] = []
        self.generator = torch.Generator().manual_seed(1)
        self.dice = random.Random(1)  # noqa: S311 - no secret
        self.refuses = refuses
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("not in train mode")
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if self.refuses:
                    1 / round(10 * param.grad.abs().max().item())
                self.state[param]["drawn"] = torch.rand(1, generator=self.generator) + self.dice.random()
        self.state["global"] = {"k": 1}
        self.calls.append(1)


def test_learning_the_state_leaves_no_trace(mlp, give) -> None:
    """Values, gradients, groups, attributes, generators, hooks and the random state are as they were."""
    model, other, hooked = mlp(), mlp(), []
    give(model)
    grads = [param.grad for param in model.parameters()]
    inner = Odd(model.parameters())
    inner.register_step_pre_hook(lambda *_: hooked.append(1))
    before, drawn, dice = dict(vars(inner)), inner.generator.get_state(), inner.dice.getstate()
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
    ]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    optimizer = FP32Optimizer(inner, OptimizerConfig(clip_grad=0.0))
    assert torch.equal(torch.rand(1), expected)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert _same(model.parameters(), other.parameters())
    assert (inner.calls, hooked) == ([], [])
    assert all(vars(inner)[key] is value for key, value in before.items())
    assert torch.equal(inner.generator.get_state(), drawn)
    assert inner.dice.getstate() == dice
    mine = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    assert mine == settings
    assert set(inner.state) == set(model.parameters())
    assert optimizer.state[model[0].weight]["drawn"].tolist() == [0.0]
    optimizer.train()
    optimizer.step()
    assert hooked == [1]


CONSTRUCTED = """
class Constructed(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"sum": torch.full_like(param, 0.125), "steps": 0}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] += param.grad.square()
                self.state[param]["steps"] += 1
                param -= group["lr"] * param.grad / self.state[param]["sum"].sqrt()

@hookimpl
def megaopt_optimizer_entries():
    return {"constructed": OptimizerEntry(Constructed)}
"""


def test_state_that_the_constructor_makes_stays(mlp, give, plugins) -> None:
    """Its values are the first step's, not a stand-in's."""
    module = importlib.import_module(plugins.install("constructed", CONSTRUCTED))
    plugins.registry("bridge")
    model, plain = mlp(), mlp()
    optimizer = build_optimizer(model, "constructed", lr=0.1, weight_decay=0.0, clip_grad=0.0)
    alone = module.Constructed(plain.parameters())
    assert optimizer.state[model[0].weight]["sum"].unique().tolist() == [0.125]
    assert optimizer.state[model[0].weight]["steps"] == 0
    for _ in range(3):
        give(model)
        give(plain)
        optimizer.step()
        alone.step()
    assert _same(model.parameters(), plain.parameters())
    assert optimizer.state[model[0].weight]["steps"] == 3


class Picky(torch.optim.SGD):
    """Divides by its learning rate or by its gradients, and keeps a count for nobody and a sum for its group."""

    def __init__(self, params: ParamsT, by: str) -> None:
        super().__init__(params, lr=0.1)
        self.by = by
        for group in self.param_groups:
            group["sum"] = torch.zeros(1)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                size = param.grad.abs().sum().item()
                self.state[param]["mean"] = param.grad / {"lr": group["lr"], "gradient": size}[self.by]
                if not (group["lr"] if self.by == "lr" else size):
                    raise ZeroDivisionError
                group["sum"] = group["sum"] + size


@pytest.mark.parametrize("by", ["lr", "gradient"])
def test_state_is_known_of_steps_that_learning_rate_or_gradients_of_zero_would_fail(mlp, give, by) -> None:
    """It is tried with others; settings that are tensors of one element, and state of nobody, harm nothing."""
    model, resumed = mlp(), mlp(seed=1)
    optimizer = FP32Optimizer(Picky(model.named_parameters(), by), OptimizerConfig(clip_grad=0.0))
    assert [list(state) for state in optimizer.state.values()] == [["mean"]] * 4
    assert [group["sum"].item() for group in optimizer.param_groups] == [0.0] * len(optimizer.param_groups)
    give(model)
    optimizer.step()
    second = FP32Optimizer(Picky(resumed.named_parameters(), by), OptimizerConfig(clip_grad=0.0))
    second.load_state_dict(optimizer.state_dict())
    assert torch.equal(second.state[resumed[0].weight]["mean"], optimizer.state[model[0].weight]["mean"])
    assert second.param_groups[0]["sum"].item() == optimizer.param_groups[0]["sum"].item() > 0


def test_an_optimizer_that_cannot_step_on_zeros_has_state_later(mlp, give, tmp_path) -> None:
    """It is built all the same, and a checkpoint brings its state."""
    model, resumed = mlp(), mlp(seed=1)
    optimizer = FP32Optimizer(Odd(model.named_parameters(), refuses=True), OptimizerConfig(clip_grad=0.0))
    assert [dict(state) for state in optimizer.state.values()] == [{}] * 4
    optimizer.train()
    give(model)
    optimizer.step()
    drawn = optimizer.state[model[0].weight]["drawn"]
    files = pytest.importorskip("megaopt_checkpoint")
    files.save_checkpoint(tmp_path / "saved", model=model, optimizer=optimizer)
    second = FP32Optimizer(Odd(resumed.named_parameters(), refuses=True), OptimizerConfig(clip_grad=0.0))
    files.load_checkpoint(tmp_path / "saved", model=resumed, optimizer=second)
    assert torch.equal(second.state[resumed[0].weight]["drawn"], drawn)


def test_dcp_says_what_it_has_no_place_for(mlp, give) -> None:
    """State of an optimizer that has none until its first step."""

    class Refusing(torch.optim.Adam):
        def step(self, closure=None):
            if all(param.grad.abs().max() < 0.01 for group in self.param_groups for param in group["params"]):
                raise ZeroDivisionError
            return super().step(closure)

    model = mlp()
    optimizer = FP32Optimizer(Refusing(model.named_parameters()), OptimizerConfig(clip_grad=0.0))
    place = FP32Optimizer(Refusing(mlp().named_parameters()), OptimizerConfig()).checkpoint_state()
    assert place.state_dict()["state"] == {}
    give(model)
    optimizer.step()
    described = optimizer.checkpoint_state().state_dict()["description"]
    with pytest.raises(StateDictError) as caught:
        place.load_state_dict({"state": {}, "description": described})
    assert str(caught.value) == (
        "the checkpoint holds 'optim.state.0.weight.exp_avg', and this optimizer has no place for it, before its first "
        "step or for a frozen parameter: step once before dcp.load, freeze after it, or use load_checkpoint, "
        "which makes state from the saved one and keeps it"
    )


def test_what_is_written_before_the_first_step_counts(mlp, give) -> None:
    """In place, or by assignment; a parameter that nobody wrote to makes its own."""
    ours, theirs = mlp(), mlp()
    optimizer = FP32Optimizer(
        torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        OptimizerConfig(clip_grad=0.0),
    )
    optimizer.state[ours[0].weight]["momentum_buffer"].fill_(2.0)
    optimizer.state[ours[0].bias]["momentum_buffer"] = torch.full((7,), 3.0)
    give(ours)
    give(theirs)
    optimizer.step()
    buffers = [optimizer.state[param]["momentum_buffer"] for param in ours.parameters()]
    grads = [param.grad for param in theirs.parameters()]
    expected = [0.9 * 2.0 + 0.5 * grads[0], 0.9 * 3.0 + 0.5 * grads[1], grads[2], grads[3]]
    for buffer, value in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer, value)


def test_modes_do_not_see_what_stands_in_for_state(mlp) -> None:
    """A schedule-free optimizer moves weights by its state, which there is none of yet."""

    class Free(torch.optim.SGD):
        def eval(self) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    assert not self.state[param]

    optimizer = FP32Optimizer(Free(mlp().parameters(), lr=0.1, momentum=0.9), OptimizerConfig())
    optimizer.eval()
    assert all("momentum_buffer" in state for state in optimizer.state.values())


def test_copies_follow_containers() -> None:
    """Shared and circular references are what they were, among the copies."""
    table = torch.ones(2, requires_grad=True)
    table.note = "mine"
    shared = [1, {2}]
    value = {"a": shared, "b": (shared, table), "none": None, "by": {table: 1}}
    value["self"] = value
    value["ids"] = {id(table): "known"}
    copied = Copies().of(value)
    assert copied is not value
    assert copied["self"] is copied
    assert list(copied) == list(value)
    assert copied["a"] is copied["b"][0]
    assert (copied["a"], shared) == ([1, {2}], [1, {2}])
    assert copied["a"] is not shared
    (mine,) = copied["by"]
    assert copied["b"][1] is mine
    assert (mine.tolist(), mine.note, mine.data_ptr() == table.data_ptr()) == ([1.0, 1.0], "mine", False)
    assert copied["ids"] == {id(mine): "known"}


class Helper:
    """Knows the parameters of an optimizer, by object and by identity."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.counts = dict.fromkeys(params, 0)
        self.places = {id(param): place for place, param in enumerate(self.counts)}


class Helped(torch.optim.SGD):
    """Steps by a helper and a method of its own, as some optimizers of others do."""

    def __init__(self, params: ParamsT) -> None:
        super().__init__(params, lr=0.1)
        self.helper = Helper([param for group in self.param_groups for param in group["params"]])
        self.update = self._update

    def _update(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        self.helper.counts[param] += 1
        self.state[param]["place"] = torch.full((1,), self.helper.places[id(param)])
        param.data.add_(param.grad + 1.0, alpha=-1.0)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, group)


def test_a_trial_reaches_copies_by_every_way(mlp) -> None:
    """What an optimizer knows of its parameters elsewhere is copied too, and says of the copies what it said."""
    model, other = mlp(), mlp()
    inner = Helped(model.parameters())
    optimizer = FP32Optimizer(inner, OptimizerConfig(clip_grad=0.0))
    assert _same(model.parameters(), other.parameters())
    assert set(inner.helper.counts.values()) == {0}
    assert [list(state) for state in optimizer.state.values()] == [["place"]] * 4


@pytest.mark.parametrize(
    "value",
    [
        Counter("aab"),
        OrderedDict(b=1, a=2),
        defaultdict(list, {"a": [1]}),
        deque([1, 2], maxlen=3),
        frozenset({1, 2}),
        (1, [2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_copies_of_containers_of_every_kind_are_equal(value) -> None:
    """A Counter's `update` counts, an OrderedDict's order is its own: each is filled as its kind is."""
    copied = Copies().of({"held": value})["held"]
    assert copied == value
    assert type(copied) is type(value)
    assert copied is not value or isinstance(value, frozenset)
