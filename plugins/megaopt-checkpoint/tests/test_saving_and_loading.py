"""Saving, loading, and what a load refuses."""

import pickle
import sys
from typing import Any

import pytest
import torch
from hostile import read, sign
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from training import logical_state, make, same, train, values

from megaopt_core import OptimizerParamScheduler, build_optimizer, get_registry
from megaopt_core.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    ScheduleError,
)
from megaopt_core.optimizers import MegatronOptimizer

OPTIMIZERS = sorted(get_registry().optimizers()) or ["adam", "sgd"]


def scheduler_of(optimizer: MegatronOptimizer, **changes: Any) -> OptimizerParamScheduler:
    """Return a schedule that changes learning rate and weight decay at every step."""
    settings = {
        "init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 2, "lr_decay_steps": 12,
        "lr_decay_style": "cosine", "start_wd": 0.0, "end_wd": 0.1, "wd_incr_steps": 12, "wd_incr_style": "linear",
    }  # fmt: skip
    return OptimizerParamScheduler(optimizer, **{**settings, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_five_and_five_steps_are_ten(tmp_path, optimizer, dtype):
    """Every installed optimizer, bit for bit, with a schedule."""
    model, whole = make(optimizer=optimizer, dtype=dtype)
    schedule = scheduler_of(whole)
    train(model, whole, range(5), schedule)
    random_state = torch.get_rng_state()
    save_checkpoint(tmp_path / "last", model, whole, schedule, extra={"rng": random_state})
    train(model, whole, range(5, 10), schedule)
    other_model, other = make(seed=1, optimizer=optimizer, dtype=dtype)
    other_schedule = scheduler_of(other)
    report = load_checkpoint(tmp_path / "last", other_model, other, other_schedule)
    assert torch.equal(report.extra["rng"], random_state)
    train(other_model, other, range(5, 10), other_schedule)
    assert same(values(model), values(other_model))
    assert same(logical_state(whole), logical_state(other))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16, "use_precision_aware_optimizer": True},
        {"dtype": torch.bfloat16, "use_precision_aware_optimizer": True, "exp_avg_dtype": torch.float16,
         "exp_avg_sq_dtype": torch.float16},
    ],
)  # fmt: skip
def test_other_precisions_go_on_with_the_same_bits(tmp_path, settings):
    """fp16 with its loss scale, bf16 with remainders, states in fp16 with their scales."""
    model, whole = make(**settings)
    train(model, whole, range(3))
    save_checkpoint(tmp_path / "last", model, whole)
    other_model, other = make(seed=1, **settings)
    load_checkpoint(tmp_path / "last", other_model, other)
    if whole.grad_scaler is not None:
        assert other.grad_scaler.state_dict() == whole.grad_scaler.state_dict()
    train(model, whole, range(3, 6))
    train(other_model, other, range(3, 6))
    assert same(values(model), values(other_model))
    assert same(logical_state(whole), logical_state(other))


def test_from_fp32_to_bf16_and_back(tmp_path):
    """Main parameters take over what fp32 parameters were, and the other way round; nothing is rounded."""
    model, full = make()
    train(model, full, range(2))
    save_checkpoint(tmp_path / "full", model, full)
    half_model, half = make(seed=1, dtype=torch.bfloat16)
    report = load_checkpoint(tmp_path / "full", half_model, half)
    assert set(report.converted.values()) == {"float32 -> bfloat16"}
    for name, param in half_model.named_parameters():
        expected = dict(model.named_parameters())[name]
        assert torch.equal(half.state[param]["main_param"], expected)
        assert torch.equal(param, expected.bfloat16())
    save_checkpoint(tmp_path / "half", half_model, half)
    again_model, again = make(seed=2)
    report = load_checkpoint(tmp_path / "half", again_model, again)
    assert set(report.converted.values()) == {"bfloat16 -> float32"}
    assert same(values(again_model), values(model))
    assert same(logical_state(again), logical_state(full))


def test_states_in_fewer_bits_load_into_fp32(tmp_path):
    """fp16 moments are decoded with their scale."""
    fewer = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.float16}
    model, small = make(dtype=torch.bfloat16, **fewer)
    train(model, small, range(2))
    save_checkpoint(tmp_path / "last", model, small)
    other_model, other = make(seed=1, dtype=torch.bfloat16)
    load_checkpoint(tmp_path / "last", other_model, other)
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(small.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])
        assert "exp_avg_scale" not in other.state[theirs]


class Renamed(torch.nn.Module):
    def __init__(self, first: str = "first", *, extra: bool = False) -> None:
        super().__init__()
        self.add_module(first, torch.nn.Linear(3, 3))
        self.last = torch.nn.Linear(3, 2)
        if extra:
            self.added = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def adam(model: nn.Module) -> MegatronOptimizer:
    """Return an optimizer."""
    return build_optimizer(model, "adam", lr=1e-3)


def test_renamed_parameters(tmp_path):
    """By mapping, by function; an unknown name and two that meet are errors."""
    model = Renamed()
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save_checkpoint(tmp_path / "last", model, optimizer)
    names = {"first.weight": "front.weight", "first.bias": "front.bias"}
    for rename in (names, lambda name: name.replace("first", "front")):
        other = Renamed("front")
        other_optimizer = adam(other)
        report = load_checkpoint(tmp_path / "last", other, other_optimizer, rename=rename)
        assert report.renamed == {"front.weight": "first.weight", "front.bias": "first.bias"}
        assert torch.equal(other.front.weight, model.first.weight)
        mine, theirs = optimizer.state[model.first.weight], other_optimizer.state[other.front.weight]
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    with pytest.raises(CheckpointMismatchError, match=r"rename: frist\.weight is not in the checkpoint"):
        load_checkpoint(tmp_path / "last", model, optimizer, rename={"frist.weight": "a"})
    with pytest.raises(CheckpointMismatchError, match=r"would both become 'last\.bias'"):
        load_checkpoint(tmp_path / "last", model, optimizer, rename={"first.bias": "last.bias"})


def test_added_and_removed_and_frozen_parameters(tmp_path):
    """Refused by name, before anything changes; `strict=False` loads what fits and says what not."""
    model = Renamed()
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save_checkpoint(tmp_path / "small", model, optimizer)
    bigger = Renamed(extra=True)
    bigger_optimizer = adam(bigger)
    before = values(bigger)
    with pytest.raises(
        CheckpointMismatchError, match=r"it lacks added\.bias, added\.weight.*strict=False"
    ) as caught:
        load_checkpoint(tmp_path / "small", bigger, bigger_optimizer)
    assert "added.bias" in caught.value.names
    assert same(values(bigger), before)
    report = load_checkpoint(tmp_path / "small", bigger, bigger_optimizer, strict=False)
    assert report.missing == ("added.bias", "added.weight", "added.bias (state)", "added.weight (state)")
    assert torch.equal(bigger.first.weight, model.first.weight)
    assert torch.equal(bigger.added.weight, before["added.weight"])
    save_checkpoint(tmp_path / "big", bigger, bigger_optimizer)
    with pytest.raises(CheckpointMismatchError, match=r"it has added\.bias.*which is not here"):
        load_checkpoint(tmp_path / "big", model, optimizer)
    frozen = Renamed()
    frozen.first.requires_grad_(False)
    frozen_optimizer = adam(frozen)
    report = load_checkpoint(tmp_path / "small", frozen, frozen_optimizer)
    assert report.unexpected == ()
    first = frozen_optimizer.state[frozen.first.weight]
    assert torch.equal(first["exp_avg"], optimizer.state[model.first.weight]["exp_avg"])
    assert torch.equal(frozen.first.weight, model.first.weight)


def test_another_shape_is_refused(tmp_path):
    """Also without `strict`: half a parameter helps nobody."""
    model, optimizer = make(width=8)
    save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = make(width=16)
    before = values(other_model)
    for strict in (True, False):
        with pytest.raises(CheckpointMismatchError, match=r"has shape \(19, 8\) there and \(19, 16\) here"):
            load_checkpoint(tmp_path / "last", other_model, other, strict=strict)
    assert same(values(other_model), before)


def test_another_optimizer_is_an_error_or_starts_anew(tmp_path):
    """Named and left as it was; or reported parameter by parameter, where that was asked for."""
    model, optimizer = make(optimizer="adam")
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = make(seed=1, optimizer="sgd")
    before = values(other_model)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"routes \d+ parameters otherwise.*'embedding.weight': it was stepped by 'adam', here by 'sgd'",
    ) as caught:
        load_checkpoint(tmp_path / "last", other_model, other)
    assert len(caught.value.names) == len(before)
    assert same(values(other_model), before)
    report = load_checkpoint(tmp_path / "last", other_model, other, strict=False)
    assert set(report.reset.values()) == {"it was stepped by 'adam', here by 'sgd'"}
    assert report.loaded == ()
    assert same(values(other_model), values(model))


def test_a_missing_plugin_is_named(tmp_path):
    """With the line that installs it; without `strict` its state starts anew."""
    model, optimizer = make(optimizer="adam")
    save_checkpoint(tmp_path / "last", model, optimizer)
    document = read(tmp_path / "last")
    document["plugins"]["adam"] = "megaopt-nowhere"
    sign(tmp_path / "last", document)
    other_model, other = make(seed=1, optimizer="sgd")
    with pytest.raises(CheckpointMismatchError, match=r"pip install megaopt-nowhere"):
        load_checkpoint(tmp_path / "last", other_model, other)
    report = load_checkpoint(tmp_path / "last", other_model, other, strict=False)
    assert all("not installed here" in reason for reason in report.reset.values())


def test_settings_of_a_run_come_back_and_changed_configurations_win(tmp_path):
    """What was changed during the run is restored, unless the configuration has changed since."""
    model, optimizer = make(lr=1e-2)
    for group in optimizer.param_groups:
        group["lr"] = 5e-3
    save_checkpoint(tmp_path / "last", model, optimizer)
    same_model, unchanged = make(seed=1, lr=1e-2)
    assert load_checkpoint(tmp_path / "last", same_model, unchanged).settings == {}
    assert {group["lr"] for group in unchanged.param_groups} == {5e-3}
    other_model, changed = make(seed=1, lr=3e-2)
    report = load_checkpoint(tmp_path / "last", other_model, changed)
    assert {group["lr"] for group in changed.param_groups} == {3e-2}
    assert report.settings["group 0: lr"] == (3e-2, 5e-3)


def test_a_scheduler_that_refuses_changes_nothing(tmp_path):
    """Tensors, groups and scheduler are as they were."""
    model, optimizer = make()
    schedule = scheduler_of(optimizer)
    train(model, optimizer, range(3), schedule)
    save_checkpoint(tmp_path / "last", model, optimizer, schedule)
    other_model, other = make(seed=1)
    other_schedule = scheduler_of(other, lr_decay_steps=99, use_checkpoint_opt_param_scheduler=False)
    before = values(other_model), logical_state(other), [dict(group) for group in other.param_groups]
    with pytest.raises(ScheduleError, match="lr_decay_steps is 99 in this scheduler and 12"):
        load_checkpoint(tmp_path / "last", other_model, other, other_schedule)
    assert same(values(other_model), before[0])
    assert same(logical_state(other), before[1])
    for group, saved in zip(other.param_groups, before[2], strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in saved.items() if k != "params"
        }
    save_checkpoint(tmp_path / "without", model, optimizer)
    with pytest.raises(CheckpointMismatchError, match="saved without a scheduler"):
        load_checkpoint(tmp_path / "without", model, optimizer, schedule)


def test_paths_that_are_no_checkpoint(tmp_path):
    """Each has its own words."""
    model, optimizer = make()
    save_checkpoint(tmp_path / "last", model, optimizer)
    (tmp_path / "link").symlink_to(tmp_path / "last")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"x")
    for name, words in {
        "link": "is a symbolic link to .*last", "empty": "is no checkpoint: it has no manifest", "file": "is a file",
        "gone": "there is no checkpoint at", "dcp": "written by torch.distributed.checkpoint itself",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path / name, model, optimizer)
    with pytest.raises(CheckpointError, match="is a symbolic link to"):
        save_checkpoint(tmp_path / "link", model, optimizer)
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        save_checkpoint(tmp_path / "dcp", model, optimizer)
    save_checkpoint(tmp_path / "empty", model, optimizer)


def test_only_the_last_checkpoints_are_kept(tmp_path):
    """By number, of one series; what is no checkpoint is left alone."""
    model, optimizer = make()
    (tmp_path / "step-1").mkdir()
    save_checkpoint(tmp_path / "other-1", model, optimizer)
    for step in (9, 10, 20, 100):
        save_checkpoint(tmp_path / f"step-{step}", model, optimizer, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other-1", "step-1", "step-100", "step-20"]
    with pytest.raises(ConfigurationError, match="needs a path that ends with a number"):
        save_checkpoint(tmp_path / "last", model, optimizer, keep_last=2)
    with pytest.raises(ConfigurationError, match="keep_last=0"):
        save_checkpoint(tmp_path / "step-5", model, optimizer, keep_last=0)


def test_values_that_no_checkpoint_holds_are_named(tmp_path):
    """Before a file is written."""
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=r"extra\.loader\.0 is a builtins\.object"):
        save_checkpoint(tmp_path / "last", model, optimizer, extra={"loader": [object()]})
    assert list(tmp_path.iterdir()) == []


def test_extra_values_come_back_as_they_were(tmp_path):
    """Types and bits."""
    extra = {
        "step": 3, "loss": float("inf"), ("a", 1): [None, True, b"\x00\xff"], "dtype": torch.bfloat16, "set": {1, 2},
        "scalar": torch.tensor(2.5, dtype=torch.float16), "z": torch.tensor([1 + 2j]), "empty": torch.empty(0, 3),
    }  # fmt: skip
    save_checkpoint(tmp_path / "last", None, None, extra=extra)
    found = load_checkpoint(tmp_path / "last", None, None).extra
    assert found.keys() == extra.keys()
    for key, value in extra.items():
        if isinstance(value, torch.Tensor):
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            assert torch.equal(found[key], value)
        else:
            assert found[key] == value


def test_nothing_in_a_checkpoint_is_unpickled(tmp_path, monkeypatch):
    """Pickle is not called, neither torch's nor Python's, and a hostile file in the folder is not even read."""
    model, optimizer = make()
    save_checkpoint(tmp_path / "last", model, optimizer, extra={"rng": torch.get_rng_state()})
    (tmp_path / "last" / ".metadata").write_bytes(pickle.dumps(Hostile()))

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_checkpoint(tmp_path / "last", model, optimizer)
    assert not hasattr(sys, "hostile")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import sys; sys.hostile = True",)


def test_torch_functions_work_as_on_any_optimizer():
    """`get_optimizer_state_dict` and `set_optimizer_state_dict`."""
    model, optimizer = make(dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    other_model, other = make(dtype=torch.bfloat16)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, state)
    assert same(logical_state(optimizer), logical_state(other))


def test_tied_parameters_are_stored_once(tmp_path):
    """And load into a model whose parameters are not tied."""
    from megaopt_testing.models import TinyGPT

    tied, untied = TinyGPT(tied=True), TinyGPT()
    save_checkpoint(tmp_path / "last", tied, adam(tied))
    assert "model.head.weight" not in read_manifest(tmp_path / "last").tensors
    report = load_checkpoint(tmp_path / "last", untied, adam(untied))
    assert torch.equal(untied.head.weight, tied.embedding.weight)
    assert torch.equal(untied.embedding.weight, tied.embedding.weight)
    assert report.missing == ()
