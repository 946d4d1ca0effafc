"""Every plugin that the documentation shows trains: it is built, stepped, saved and loaded, as a reader would."""

import json
import math
import re
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megaopt_testing import temporary_plugin

from megaopt_core import OptimizerEntry, OptimizerParamScheduler, build_optimizer, get_registry, hookimpl
from megaopt_core.errors import ParallelGroupError, UnknownNameError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

files = pytest.importorskip("megaopt_checkpoint")
DOCS = Path(__file__).parents[2] / "docs"


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


OVER_PROCESSES = ("split-steps",)
"""Pages whose examples need several processes: tests/thirdparty trains and resumes them."""

PLUGINS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(_blocks(page))
    if "megaopt_api" in block and page.stem not in OVER_PROCESSES
]


class Momentum:
    """An optimizer for examples that bring none."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return torch's Adam."""
        return {"example_adam": OptimizerEntry(torch.optim.AdamW)}


class PackedAttention(torch.nn.Module):
    """What an example looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Linear(4, 12)


class LearnedQueries(torch.nn.Module):
    """What an example looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = torch.nn.Parameter(torch.randn(3, 4))


class Model(torch.nn.Module):
    """Something for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PackedAttention()
        self.learned = LearnedQueries()
        self.router = torch.nn.Linear(4, 3)


def _module(block: str) -> ModuleType:
    module = ModuleType("example")
    exec(block, vars(module))  # noqa: S102 - running the example is the test
    return module


def _train(model: Model, optimizer: MegatronOptimizer, steps: range) -> None:
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance)
        optimizer.step()


def _scheduler(optimizer: MegatronOptimizer, style: str) -> OptimizerParamScheduler:
    offers = get_registry().schedules()[style]
    rate = style if offers.learning_rate is not None else "constant"
    decay = style if offers.weight_decay is not None else "constant"
    return OptimizerParamScheduler(optimizer, 0.0, 0.05, 0.01, 0, 10, rate, 0.1, 0.1, 10, decay)


def _values(model: Model) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _resumes(
    folder: Path, optimizer: str, sharding: str | None, style: str | None, precision: str | None
) -> None:
    """Train, save, load into another, and train both on: nothing differs."""

    def build(seed: int) -> tuple:
        torch.manual_seed(seed)
        model = Model()
        made = build_optimizer(model, optimizer, lr=0.05, sharding=sharding, precision=precision)
        return model, made, None if style is None else _scheduler(made, style)

    first, second = build(0), build(1)
    before = _values(first[0])
    _train(*first[:2], range(2))
    for name, value in _values(first[0]).items():
        assert not torch.equal(value, before[name]), name
        assert value.isfinite().all(), name
    if first[2] is not None:
        first[2].step(increment=3)
        assert first[1].param_groups[0]["lr"] != 0.05
    files.save_checkpoint(folder, first[0], first[1], first[2])
    files.load_checkpoint(folder, second[0], second[1], second[2])
    for model, made, _ in (first, second):
        _train(model, made, range(2, 4))
    assert [group["lr"] for group in first[1].param_groups] == [
        group["lr"] for group in second[1].param_groups
    ]
    expected = _values(first[0])
    assert all(torch.equal(value, expected[name]) for name, value in _values(second[0]).items())


@pytest.mark.parametrize("block", PLUGINS)
def test_every_plugin_of_the_documentation_trains_and_resumes(block: str, tmp_path: Path, capsys) -> None:
    """With each optimizer, strategy and schedule that it offers; what it says of parameters is in the routing."""
    module = _module(block)
    known = get_registry()
    optimizers, strategies, schedules = known.optimizers(), known.strategies(), known.schedules()
    policies = known.precision_policies()
    with temporary_plugin(Momentum(), name="momentum"), temporary_plugin(module) as registry:
        offered = {
            "optimizer": registry.optimizers().keys() - optimizers.keys() - {"example_adam"},
            "sharding": registry.strategies().keys() - strategies.keys(),
            "style": registry.schedules().keys() - schedules.keys(),
            "precision": registry.precision_policies().keys() - policies.keys(),
        }
        cases = [(kind, name) for kind, names in offered.items() for name in sorted(names)]
        for kind, name in cases or [("sharding", "replicated")]:
            chosen = {
                "optimizer": "example_adam",
                "sharding": None,
                "style": None,
                "precision": None,
                kind: name,
            }
            _resumes(tmp_path / name, **chosen)
        if hasattr(module, "megaopt_commands"):
            parser = ArgumentParser()
            module.megaopt_commands(parser.add_subparsers())
            arguments = parser.parse_args(["count"])
            assert arguments.run(arguments) == 0
            assert f"{len(registry.optimizers())} optimizers" in capsys.readouterr().out
        if hasattr(module, "megaopt_shared_state"):
            model = Model()
            made = build_optimizer(model, "example_adam", lr=0.05)
            shown = module.megaopt_shared_state(made).states()
            assert shown.keys() == dict(model.named_parameters()).keys()
        if hasattr(module, "megaopt_stored_routing"):
            path = tmp_path / "run.routing.json"
            path.write_text(
                json.dumps({name: ("example_adam", "matrix") for name, _ in Model().named_parameters()})
            )
            made = build_optimizer(Model(), "example_adam", lr=0.05, routing=path)
            assert {route.decision.role for route in made.routing.params.values()} == {"matrix"}
        if hasattr(module, "megaopt_step_runner"):
            model = Model()
            made = build_optimizer(model, "example_adam", lr=0.05)
            entry = registry.optimizer("example_adam")
            assert module.megaopt_step_runner(made.config, entry, "example_adam") is None
            made.parts[0].runner = module.megaopt_step_runner(made.config, entry, "mine")
            _train(model, made, range(1))
            assert capsys.readouterr().out == f"{len(list(model.parameters()))} tensors are stepped\n"
        if hasattr(module, "megaopt_learn_state"):
            model = torch.nn.Linear(3, 2, bias=False)
            assert module.megaopt_learn_state(torch.optim.SGD(model.parameters(), lr=0.1)) is None
            inner = torch.optim.Muon(model.parameters())
            module.megaopt_learn_state(inner)(inner)
            assert {key: value.shape for key, value in inner.state[model.weight].items()} == {
                "momentum_buffer": (2, 3)
            }
        if hasattr(module, "megaopt_process_groups"):
            model = Model()
            model.mesh_of_my_trainer = {"axis": None}
            with pytest.raises(ParallelGroupError, match=r"unknown process groups \['axis'\]"):
                build_optimizer(model, "example_adam", lr=0.05)
        assert cases or any(hasattr(module, hook) for hook in _HOOKS_WITHOUT_NAMES)


_HOOKS_WITHOUT_NAMES = (
    "megaopt_annotate_params",
    "megaopt_param_overrides",
    "megaopt_advice",
    "megaopt_commands",
    "megaopt_state_codes",
    "megaopt_shared_state",
    "megaopt_stored_routing",
    "megaopt_resolve_optimizer",
    "megaopt_after_step",
    "megaopt_step_observers",
    "megaopt_step_runner",
    "megaopt_learn_state",
    "megaopt_process_groups",
)


def test_what_examples_say_of_parameters_is_heard() -> None:
    """The annotation gives the fused weight its view; the override takes weight decay off the router."""
    hooks = {
        hook: _module(block.values[0])
        for hook in _HOOKS_WITHOUT_NAMES[:2]
        for block in PLUGINS
        if f"def {hook}(" in block.values[0]
    }
    with temporary_plugin(Momentum(), name="momentum"):
        with temporary_plugin(hooks["megaopt_annotate_params"]):
            routing = build_optimizer(Model(), "example_adam", lr=0.1).routing
            assert routing.params["attention.packed.weight"].decision.view.split_sizes == (4, 4, 4)
            assert routing.params["learned.queries"].decision.view is None
        with temporary_plugin(hooks["megaopt_param_overrides"]):
            optimizer = build_optimizer(Model(), "example_adam", lr=0.1, weight_decay=0.1)
            decay = {
                name: group["weight_decay"]
                for group in optimizer.param_groups
                for name in (optimizer.names[param] for param in group["params"])
            }
            assert decay["router.weight"] == 0.0
            assert math.isclose(decay["attention.packed.weight"], 0.1)


def test_the_example_that_resolves_names_is_asked() -> None:
    """It gives an entry, refuses in words, and leaves other names alone."""
    (block,) = [block for block in PLUGINS if "def megaopt_resolve_optimizer(" in block.values[0]]
    with temporary_plugin(_module(block.values[0])) as registry:
        optimizer = build_optimizer(Model(), "momentum-80", lr=0.1)
        assert {group["momentum"] for group in optimizer.param_groups} == {0.8}
        with pytest.raises(UnknownNameError, match=r"^momentum-x: write momentum- and hundredths"):
            registry.optimizer("momentum-x")
        assert not registry.has_optimizer("nonsense")


def test_the_other_example_of_the_guide_to_strategies_runs() -> None:
    """A layout for 512 ranks is checked without one of them."""
    (other,) = [block for block in _blocks(DOCS / "writing-a-strategy.md") if "megaopt_api" not in block]
    module = _module(other)
    assert module.world.size("dp") * module.world.size("tp") == 512
    assert len(module.layout.pieces({"tp": 7})) == 100
