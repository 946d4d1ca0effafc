"""What people give by mistake: models, optimizers, configurations, lists, None, classes, state dicts, paths, losses."""

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megaopt_core import (
    ChainedOptimizer,
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    ParamKey,
    ProcessGroupCollection,
    build_optimizer,
    get_canonical_lr_for_logging,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
    route,
)

type Wrong = tuple[str, Any, Callable[[], Any]]

ALLOWED = (
    "give ",
    "Give ",
    "Build the",
    "has the keys",
    "is a list of",
    "maps indices or names",
    "comes first",
    "cannot be a path",
    "must return a name",
    "wraps a plain",
    "takes a list",
    "convert the model",
    "move the model",
    "unfreeze",
    "materialise",
    "the model has no parameters",
    "lacks",
    "without names",
    "is no mapping",
    "is no checkpoint",
    "there is no checkpoint",
    "a checkpoint is a folder",
    "must return",
    "run one forward",
    "Build the optimizer anew",
    "Allowed are",
    "is a ParamGroupOverride",
    "keys are strings",
    "a value is a",
    "wrap it in",
    "Build a new optimizer",
    "has its parameter's shape",
    "is no ProcessGroupCollection, DeviceMesh or mapping of",
    "(2, 2) here",
)


class Shown:
    """Stands for a value whose error shows something else than its `repr`.

    Args:
        words: what the error has to show.
    """

    def __init__(self, words: str) -> None:
        self.words = words

    def __repr__(self) -> str:
        return self.words


def layer() -> nn.Linear:
    """Return a small model."""
    return nn.Linear(2, 2)


@functools.cache
def built() -> tuple[nn.Module, Any]:
    """Return a model and its optimizer, which no input may change."""
    model = layer()
    return model, build_optimizer(model, "adam", lr=0.1)


def plain() -> torch.optim.Optimizer:
    """Return an optimizer of torch's."""
    return torch.optim.SGD(layer().parameters(), lr=0.1)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "None"),
    "a class": (lambda: nn.Linear, "the class Linear"),
    "a generator": (lambda: layer().parameters(), "parameters"),
    "names and parameters": (lambda: layer().named_parameters(), "named parameters"),
    "groups": (lambda: [{"params": list(layer().parameters()), "lr": 0.1}], "parameter groups"),
    "parameters": (lambda: list(layer().parameters()), "parameters"),
    "a tensor": (lambda: torch.zeros(2), "a tensor"),
    "a parameter": (lambda: nn.Parameter(torch.zeros(2)), "a tensor"),
    "a dict": (lambda: {"lr": 1}, "dict"),
    "modules by name": (lambda: {"first": layer()}, "dict"),
    "a state dict": (lambda: layer().state_dict(), "OrderedDict"),
    "a name": (lambda: "gpt2", "gpt2"),
    "nothing in a list": (list, "an empty sequence"),
    "None in a list": (lambda: [layer(), None], "NoneType"),
    "a name in a tuple": (lambda: (layer(), "head"), "str"),
    "a set": (lambda: {layer()}, "a set"),
    "an optimizer": (plain, "the optimizer SGD"),
    "a number": (lambda: 3, "int"),
    "a function": (lambda: layer, "function"),
    "a package": (lambda: nn, "module"),
}
CONFIG = OptimizerConfig(lr=0.1)


def wrong_model(pick: random.Random) -> Wrong:
    """Something that is no model, for whatever takes one."""
    from megaopt_checkpoint import load_checkpoint, save_checkpoint

    make, said = MODELS[pick.choice(sorted(MODELS))]
    model = make()
    takers: list[Callable[[], Any]] = [
        lambda: build_optimizer(model, "adam", lr=0.1),
        lambda: get_megatron_optimizer(CONFIG, model),
        lambda: route(CONFIG, model),
    ]
    if model is not None:  # saved and loaded, None is no model at all
        takers += [
            lambda: save_checkpoint(Path(tempfile.gettempdir()) / "never-made", model, built()[1]),
            lambda: load_checkpoint(Path(tempfile.gettempdir()) / "never-made", model, built()[1]),
        ]
    return "model", Shown(said), pick.choice(takers)


def wrong_optimizer(pick: random.Random) -> Wrong:
    """Something that is no optimizer's name, or no optimizer of ours."""
    from megaopt_checkpoint import load_checkpoint, save_checkpoint

    names: list[tuple[Any, str]] = [
        (None, "NoneType"),
        (torch.optim.Adam, "torch:Adam"),
        (plain(), "FP32Optimizer"),
        (CONFIG, "OptimizerConfig"),
        (3, "int"),
        (["adam"], "list"),
        (b"adam", "bytes"),
        ({"name": "adam"}, "dict"),
        (lambda params: params, "function"),
    ]
    ours: list[tuple[Any, str]] = [
        (plain(), "SGD"),
        (torch.optim.SGD, "the class SGD"),
        ("adam", "str"),
        (CONFIG, "OptimizerConfig"),
        (layer(), "Linear"),
    ]
    if pick.random() < 0.5:
        given, said = pick.choice(names)
        return "optimizer", Shown(said), lambda: build_optimizer(layer(), given, lr=0.1)
    given, said = pick.choice(ours)
    folder = Path(tempfile.gettempdir()) / "never-made"
    takers = [
        lambda: save_checkpoint(folder, built()[0], given),
        lambda: load_checkpoint(folder, built()[0], given),
    ]
    return "optimizer", Shown(said), pick.choice(takers)


def wrong_config(pick: random.Random) -> Wrong:
    """Something that is no configuration."""
    given, said = pick.choice(
        [
            (None, "NoneType"),
            ({"lr": 0.1}, "dict"),
            (OptimizerConfig, "the class OptimizerConfig"),
            ("adam", "str"),
            (layer(), "Linear"),
            (3, "int"),
        ]
    )
    takers = [
        lambda: get_megatron_optimizer(given, [layer()]),
        lambda: route(given, layer()),
        lambda: get_mup_config_overrides(given, 2.0),
        lambda: get_standard_config_overrides(given),
        lambda: FP32Optimizer(plain(), given),
        lambda: MixedPrecisionOptimizer(plain(), given),
    ]
    return "config", Shown(said), pick.choice(takers)


def wrong_override_shape(pick: random.Random) -> Wrong:
    """Overrides that are no mapping of keys to settings."""
    key = ParamKey(name="weight")
    given, name = pick.choice(
        [
            ({key: None}, "NoneType"),
            ({key: 3}, "int"),
            ({key: [("lr", 1)]}, "list"),
            ({key: OptimizerConfig()}, "OptimizerConfig"),
            ({key: {3: 1}}, "3"),
            ({key: {"weight_dcay": 1.0}}, "weight_dcay"),
            ({key: {"lr": object()}}, "object"),
            ({"weight": {"lr": 0.1}}, "ParamKey(name='weight')"),
            ({3: {}}, "3"),
            ({ParamKey: {}}, "ParamKey"),
            ({("weight",): {"lr": 1.0}}, "('weight',)"),
            ([key], "list"),
            ("weight", "weight"),
            ({ParamKey(name="wieght"): {"lr": 0.1}}, "wieght"),
        ]
    )
    return "overrid", Shown(name), lambda: build_optimizer(layer(), "adam", lr=0.1, overrides=given)


def wrong_group_argument(pick: random.Random) -> Wrong:
    """Arguments of a build that are of another kind."""
    name, given, said = pick.choice(
        [
            ("pg_collection", "world", "world"),
            ("pg_collection", 3, "3"),
            ("pg_collection", [1], "[1]"),
            ("pg_collection", ProcessGroupCollection, "ProcessGroupCollection"),
            ("fqn", "layers.{}", "str"),
            ("fqn", 3, "int"),
            ("routing", 3, "int"),
            ("routing", {"a": "b"}, "dict"),
            ("routing", "/nowhere/at/all", "/nowhere/at/all"),
        ]
    )
    return name, Shown(said), lambda: build_optimizer(layer(), "adam", lr=0.1, **{name: given})


def wrong_state(pick: random.Random) -> Wrong:
    """State dicts that are none, or are damaged."""
    model = layer()
    optimizer = build_optimizer(model, "adam", lr=0.1)
    before = optimizer.state_dict()
    group = before["param_groups"][0]
    name, given = pick.choice(
        [
            ("state dict", None),
            ("state dict", []),
            ("state dict", "last.pt"),
            ("state dict", {}),
            ("state dict", {"state": {}}),
            ("state dict", layer().state_dict()),
            ("state dict", {"state": {}, "param_groups": []}),
            ("param_groups", {"state": {}, "param_groups": "x"}),
            ("param_groups", {"state": {}, "param_groups": None}),
            ("param group 0", {"state": {}, "param_groups": [3]}),
            ("param group 0", {"state": {}, "param_groups": [{}]}),
            ("param group 0", {"state": {}, "param_groups": [{**group, "params": 3}]}),
            ("param group 0", {"state": {}, "param_groups": [{**group, "params": [[1]]}]}),
            ("param group 0", {"state": {}, "param_groups": [{**group, "param_names": 3}]}),
            ("param group 0", {"state": {}, "param_groups": [{**group, "param_names": [3]}]}),
            ("'state'", {**before, "state": None}),
            ("'state'", {**before, "state": [1]}),
            ("weight", {**before, "state": {0: 3}}),
            ("exp_avg", {**before, "state": {0: {"exp_avg": "x"}}}),
            ("weight", {**before, "state": {0: {"exp_avg": torch.zeros(5)}}}),
        ]
    )

    def load() -> None:
        values = [param.detach().clone() for param in model.parameters()]
        groups = [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(given)
        finally:
            assert all(map(torch.equal, values, model.parameters())), "a refused load moved the weights"
            kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            now = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            assert kept == now, "a refused load changed groups"

    return name, None, load


def wrong_path(pick: random.Random) -> Wrong:
    """Something that is no path of a checkpoint."""
    from megaopt_checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint

    given, said = pick.choice(
        [
            (None, "NoneType"),
            (3, "int"),
            ([], "list"),
            (layer(), "Linear"),
            (b"last", "b'last'"),
            ("", "''"),
            ("a\0b", "null byte"),
            ("x" * 300, "File name too long"),
        ]
    )
    model, optimizer = built()
    takers: list[Callable[[], Any]] = [
        lambda: save_checkpoint(given, model, optimizer),
        lambda: load_checkpoint(given, model, optimizer),
        lambda: verify_checkpoint(given),
        lambda: convert_checkpoint(given, "never-made.pt"),
    ]
    return "path", Shown(said), pick.choice(takers)


def wrong_side(pick: random.Random) -> Wrong:
    """Something else than a scheduler, a process group, a renaming, a naming, for a save or a load."""
    from megaopt_checkpoint import load_checkpoint, save_checkpoint

    model, optimizer = built()
    folder = Path(tempfile.gettempdir()) / "never-made"
    name, given, said = pick.choice(
        [
            ("scheduler", 3, "int"),
            ("scheduler", torch.optim.lr_scheduler.StepLR, "the class StepLR"),
            ("scheduler", {"step": 1}, "dict"),
            ("process_group", "world", "str"),
            ("process_group", 0, "int"),
            ("fqn", "layers.{}", "str"),
            ("fqn", lambda chunk, local: 3, "int"),
            ("rename", 3, "int"),
            ("rename", {"weight": 3}, "int"),
        ]
    )
    takers = [lambda: load_checkpoint(folder, model, optimizer, **{name: given})]
    if name != "rename":
        takers.append(lambda: save_checkpoint(folder, model, optimizer, **{name: given}))
    is_seen_late = name == "fqn" and callable(given)
    return name, Shown(said), takers[-1] if is_seen_late else pick.choice(takers)


def wrong_wrapping(pick: random.Random) -> Wrong:
    """Something that is no optimizer, for what wraps, chains or schedules one."""
    model = layer()
    given, said = pick.choice(
        [
            (None, "NoneType"),
            (3, "int"),
            (model, "Linear"),
            (model.parameters(), "generator"),
            ("adam", "str"),
        ]
    )
    chained = [given] if not isinstance(given, (int, type(None))) and pick.random() < 0.5 else given
    schedule = (0.0, 0.1, 0.0, 1, 10, "linear", 0.0, 0.0, 1, "constant")
    name, give = pick.choice(
        [
            ("FP32Optimizer", lambda: FP32Optimizer(given, CONFIG)),
            ("MixedPrecisionOptimizer", lambda: MixedPrecisionOptimizer(given, CONFIG)),
            ("ChainedOptimizer", lambda: ChainedOptimizer(chained)),
            ("optimizer", lambda: OptimizerParamScheduler(given, *schedule)),
        ]
    )
    if name == "ChainedOptimizer" and chained is given:
        said = {"generator": "Parameter", "str": "str"}.get(said, said)
    return name, Shown(said), give


def wrong_step(pick: random.Random) -> Wrong:
    """Something that is no closure, no groups, no limit."""
    _, optimizer = built()
    given, said = pick.choice([(torch.zeros(1), "Tensor"), (3, "int"), ("x", "str"), ([1], "list")])
    return pick.choice(
        [
            ("closure", Shown(said), lambda: optimizer.step(given)),
            ("param_groups", Shown(said), lambda: get_canonical_lr_for_logging(given)),
            ("add_param_group", None, lambda: optimizer.add_param_group({"params": []})),
        ]
    )


def wrong_time(pick: random.Random) -> Wrong:
    """What is right in itself, and comes too late or too early."""
    model = nn.Sequential(layer(), layer())

    def nothing_trains():
        build_optimizer(model.requires_grad_(False), "adam", lr=0.1)

    def nothing_there():
        build_optimizer(nn.ReLU(), "adam", lr=0.1)

    def on_meta():
        build_optimizer(model.to("meta"), "adam", lr=0.1)

    def not_initialized():
        build_optimizer(nn.LazyLinear(3), "adam", lr=0.1)

    def after(change):
        optimizer = build_optimizer(model, "adam", lr=0.1)
        changed = change(model)
        device = next(changed.parameters()).device
        changed(torch.ones(1, 2, dtype=next(changed.parameters()).dtype, device=device)).sum().backward()
        optimizer.step()

    dtype = pick.choice((torch.float64, torch.bfloat16))
    return pick.choice(
        [
            ("requires_grad", None, nothing_trains),
            ("no parameters", None, nothing_there),
            ("meta device", Shown("0.weight"), on_meta),
            ("weight", None, not_initialized),
            ("0.weight", Shown(str(dtype).removeprefix("torch.")), lambda: after(lambda it: it.to(dtype))),
            ("meta", Shown("0.weight"), lambda: after(lambda it: it.to("meta"))),
            ("meta", Shown("0.weight"), lambda: after(lambda it: it.to_empty(device="meta"))),
        ]
    )


KINDS = [
    wrong_model,
    wrong_optimizer,
    wrong_config,
    wrong_override_shape,
    wrong_group_argument,
    wrong_state,
    wrong_path,
    wrong_side,
    wrong_wrapping,
    wrong_step,
    wrong_time,
]
