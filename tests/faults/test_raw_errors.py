"""Wrong input ends in an error of our own that names it, whoever's class meets it first."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from torch import nn

from megaopt_core import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    build_optimizer,
    get_megatron_optimizer,
    route,
)
from megaopt_core.config import parse_assignments
from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import MATRIX


def model() -> nn.Sequential:
    """Return a small model, with a hidden matrix and a head."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made[0].weight.matrix_view, made[1].weight.use_muon = MATRIX, False
    return made


def build(**settings: Any) -> MegatronOptimizer:
    """Build for a small model."""
    return build_optimizer(model(), "adam", lr=0.1, **settings)


def fails(*_: Any, **__: Any) -> None:
    """Raise as a user's function does that has a fault."""
    raise KeyError("mine")


class Odd(nn.Parameter):
    """A parameter whose attribute fails."""

    @property
    def marked(self) -> bool:
        """Raise."""
        raise KeyError("mine")


class Silent:
    """Cannot show itself."""

    def __repr__(self) -> str:
        raise KeyError("mine")


def override(**key: Any) -> dict[str, Any]:
    """Return overrides with one key."""
    return {"overrides": {ParamKey(**key): {"wd_mult": 0.0}}}


def nested(kind: Callable[[Any], Any], value: Any = ()) -> Any:
    """Return a value that nests a hundred thousand times."""
    for _ in range(100_000):
        value = kind(value)
    return value


def with_odd_attribute() -> None:
    """Look for an attribute that raises."""
    odd = model()
    odd[1].weight = Odd(torch.ones(4, 4))
    build_optimizer(odd, "adam", lr=0.1, **override(attr="marked"))


def with_timers() -> None:
    """Step with timers that raise."""
    net = model()
    optimizer = build_optimizer(net, "adam", lr=0.1, timers=fails)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def with_rename(folder: Path) -> None:
    """Load with a function that raises."""
    net = model()
    optimizer = build_optimizer(net, "adam", lr=0.1)
    save_checkpoint(folder / "saved", net, optimizer)
    load_checkpoint(folder / "saved", net, optimizer, rename=fails)


def from_toml(text: str, folder: Path) -> None:
    """Read a file."""
    pytest.importorskip("megaopt_tools")
    (folder / "run.toml").write_text(text)
    OptimizerConfig.from_toml(folder / "run.toml")


def in_inference_mode() -> None:
    """Build for a model that cannot train."""
    with torch.inference_mode():
        net = model()
    build_optimizer(net, "adam", lr=0.1)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "predicate": (
        lambda _: build(**override(predicate=ParamPredicate("vectors", fails))),
        r"predicate 'vectors' on a parameter of shape \(4, 4\) raised KeyError: 'mine'",
    ),
    "predicate with name": (
        lambda _: build(**override(with_name_predicate=ParamWithNamePredicate("late", fails))),
        "predicate 'late' on parameter '0.weight' raised KeyError: 'mine'",
    ),
    "predicate of another signature": (
        lambda _: build(**override(predicate=ParamPredicate("two", lambda param, name: True))),
        "predicate 'two' on a parameter .* raised TypeError",
    ),
    "predicate that returns a tensor": (
        lambda _: build(**override(predicate=ParamPredicate("large", lambda param: param > 0))),
        "predicate 'large' on a parameter .* raised RuntimeError",
    ),
    "attribute": (
        lambda _: with_odd_attribute(),
        "attribute 'marked' of parameter '1.weight' raised KeyError",
    ),
    "fqn": (lambda _: build(fqn=fails), r"fqn\(0, '0.weight'\) raised KeyError: 'mine'"),
    "fqn of another signature": (lambda _: build(fqn=lambda name: name), "fqn.* raised TypeError"),
    "timers": (lambda _: with_timers(), r"timers\('optimizer-.*', log_level=1\) raised KeyError: 'mine'"),
    "rename": (with_rename, r"rename\('.*'\) raised KeyError: 'mine'"),
    "key that is a number": (lambda _: OptimizerConfig.from_dict({1: 2}), "from_dict: got the key 1"),
    "key that is bytes": (lambda _: OptimizerConfig.from_dict({b"lr": 2}), "from_dict: got the key b'lr'"),
    "key that is None": (
        lambda _: OptimizerConfig.from_dict({"lr": 1, None: 2}),
        "from_dict: got the key None",
    ),
    "nested setting": (
        lambda _: OptimizerConfig.from_dict({"lr": nested(lambda value: [value])}),
        "lr=a list that cannot be shown: must be a number",
    ),
    "nested setting of a plugin": (
        lambda _: OptimizerConfig(optimizer="adam", adam_eps=nested(lambda value: {"a": value})),
        "adam_eps=a dict that cannot be shown",
    ),
    "nested override": (
        lambda _: build(overrides={ParamKey(name="*"): {"wd_mult": nested(lambda value: (value,))}}),
        "override wd_mult=a tuple that cannot be shown",
    ),
    "a value that cannot be shown": (
        lambda _: OptimizerConfig(lr=Silent()),
        "lr=a Silent that cannot be shown",
    ),
    "nested argument": (
        lambda _: OptimizerConfig(**parse_assignments(["lr=" + "[" * 100_000])),
        r"lr='\[\[\[.*must be a number",
    ),
    "nested TOML": (
        partial(from_toml, "lr = " + "[" * 100_000 + "]" * 100_000),
        "run.toml: nests lists or tables too deeply",
    ),
    "inference mode": (
        lambda _: in_inference_mode(),
        "because it was made inside torch.inference_mode",
    ),
}


@pytest.mark.parametrize(("give", "message"), WRONG.values(), ids=WRONG)
def test_the_error_is_ours_and_says_whose_fault_it_is(give, message, tmp_path):
    """It names the argument, and what was raised is its cause."""
    with pytest.raises(MegaoptError, match=message):
        give(tmp_path)


PATHS = {
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "long name": "x" * 5000,
    "long path": "a/" * 3000,
    "file": "/dev/null/x",
}
TAKES_A_PATH: dict[str, Callable[[str], Any]] = {
    "config_logger_dir": lambda path: build(config_logger_dir=path),
    "dump_param_to_param_group_map": lambda path: get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.1), [model()], dump_param_to_param_group_map=path
    ),
    "routing": lambda path: build(routing=path),
    "from_toml": OptimizerConfig.from_toml,
    "verify_checkpoint": verify_checkpoint,
    "load_checkpoint": lambda path: load_checkpoint(path, model(), build()),
    "save_checkpoint": lambda path: save_checkpoint(path, model(), build()),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("take", TAKES_A_PATH.values(), ids=TAKES_A_PATH)
def test_what_cannot_be_a_path_is_refused(take, path, tmp_path, monkeypatch):
    """By every argument and setting that is one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MegaoptError):
        take(path)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "codes": {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8"},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("settings", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_an_optimizer_that_is_built_in_another_mode_steps_the_same(optimizer, settings, mode):
    """State that is made there is state, on the parameters' device."""
    pytest.importorskip("megaopt_muon")
    ends = []
    for enter in (torch.enable_grad, mode):
        torch.manual_seed(0)
        net = model().to(torch.bfloat16 if settings else torch.float32)
        if optimizer == "sgd" and "exp_avg_dtype" in settings:
            pytest.skip("sgd has no such state")
        with enter():
            route(OptimizerConfig(optimizer=optimizer, lr=0.1), net)
            built = build_optimizer(net, optimizer, lr=0.1, **settings)
        for _ in range(2):
            net(torch.ones(2, 4, dtype=net[0].weight.dtype)).sum().backward()
            built.step()
            built.zero_grad()
        ends.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    assert torch.equal(*ends)


WRAPS = """
import torch
from torch import nn
for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    def wrap(init):
        def wrapped({arguments}):
            return init({call})
        return wrapped
    cls.__init__ = wrap(cls.__init__)
from megaopt_core import build_optimizer
for name in ("adam", "adamw", "sgd"):
    model = nn.Linear(4, 4)
    optimizer = build_optimizer(model, name, lr=0.25, weight_decay=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    (group,) = optimizer.parts[0].inner.param_groups[:1]
    assert group["lr"] == 0.25, group
"""


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("self, *args, **kwargs", "self, *args, **kwargs"),
        ("self, params, *args, **kwargs", "self, params, *args, **kwargs"),
    ],
)
def test_torch_classes_may_be_wrapped_without_their_signature(arguments, call):
    """As packages do that count or trace steps, before ours is imported."""
    code = WRAPS.format(arguments=arguments, call=call)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
