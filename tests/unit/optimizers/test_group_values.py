"""What stands in a group is checked as a setting is, whoever writes it: an override, a user, a state dict."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megaopt_testing.plugins import temporary_plugin
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import (
    FP32Optimizer,
    OptimizerConfig,
    OptimizerEntry,
    OptimizerParamScheduler,
    ParamKey,
    build_optimizer,
    hookimpl,
)
from megaopt_core.config import between, one_of, whole_number
from megaopt_core.errors import ConfigurationError, OverrideError, ScheduleError, StateDictError

pytestmark = pytest.mark.any_python

WRONG = [
    ("lr", -1.0, "must be a number of at least 0, or None"),
    ("lr", math.nan, "must be a number of at least 0, or None"),
    ("max_lr", -0.93, "must be a number of at least 0, or None"),
    ("min_lr", "0.1", "must be a number of at least 0, or None"),
    ("weight_decay", math.inf, "must be a number of at least 0"),
    ("weight_decay", None, "must be a number of at least 0"),
    ("wd_mult", True, "must be a number of at least 0"),
    ("betas", (1.5, 0.9), "entry 0 must be a number in [0.0, 1.0)"),
    ("betas", (0.9, math.nan), "entry 1 must be a number in [0.0, 1.0)"),
    ("betas", (0.9,), "must be 2 numbers"),
    ("betas", "x", "must be 2 numbers"),
    ("eps", -1, "must be a number of at least 0"),
    ("amsgrad", "no", "must be True or False"),
    ("fused", 7, "must be True or False, or None"),
    ("clip_grad", 1.0, "must be True or False"),
    ("lr", torch.tensor(-1.0), "must be a number of at least 0, or None"),
]
OF_OVERRIDES = [case for case in WRONG if case[0] not in ("lr", "max_lr", "min_lr", "wd_mult", "clip_grad")]


@pytest.mark.parametrize(("key", "value", "allowed"), OF_OVERRIDES)
def test_an_override_is_checked(mlp, build, key, value, allowed) -> None:
    """The message names who gave it, the key, the value and what is allowed."""
    with pytest.raises(OverrideError) as caught:
        build(mlp(), overrides={ParamKey(name="2.*"): {key: value}})
    assert str(caught.value) == f"config_overrides: ParamKey(name=('2.*',)): {key}={value!r}: {allowed}"
    assert (caught.value.key, caught.value.value) == (key, value)


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG)
def test_what_is_written_later_is_checked_before_the_step(
    mlp, build, give, snapshot, key, value, allowed
) -> None:
    """Of a chain, no child has stepped then; a right value goes on as if nothing had been."""
    model = mlp()
    optimizer = build(model, overrides={ParamKey(name="2.*"): {"optimizer": "t_momentum"}})
    give(model)
    optimizer.step()
    group = optimizer.param_groups[0]
    before, present = snapshot(model, optimizer), group.get(key, True)
    group[key] = value
    with pytest.raises(ConfigurationError) as caught:
        optimizer.step()
    assert str(caught.value) == f"param group 0 of AdamW: {key}={value!r}: {allowed}"
    assert (caught.value.setting, caught.value.value is value) == (key, True)
    group[key] = present
    after = snapshot(model, optimizer)
    assert (after.params, after.state) == (before.params, before.state)
    assert optimizer.step().update_successful


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1j)], ids=["two numbers", "complex"])
def test_a_tensor_that_is_no_number_is_refused(mlp, build, give, value) -> None:
    """A learning rate may be a tensor of one real number."""
    model = mlp()
    optimizer = build(model)
    optimizer.param_groups[0]["lr"] = value
    give(model)
    with pytest.raises(ConfigurationError, match="lr=tensor"):
        optimizer.step()


@pytest.mark.parametrize("stage", ["prepare_grads", "step_with_ready_grads"])
def test_the_stages_check_too(mlp, build, give, stage) -> None:
    """A trainer that drives them writes between them."""
    model = mlp()
    optimizer = build(model)
    give(model)
    if stage == "step_with_ready_grads":
        optimizer.prepare_grads()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigurationError, match=r"lr=-1\.0"):
        getattr(optimizer, stage)()


def test_a_wrapped_optimizers_groups_are_checked_by_their_defaults() -> None:
    """No plugin describes it; torch's own defaults say what kind each value is."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = FP32Optimizer(torch.optim.Adam([weight]), OptimizerConfig())
    weight.grad = torch.ones(2)
    optimizer.param_groups[0]["betas"] = (0.9, 2.0)
    with pytest.raises(
        ConfigurationError, match=r"betas=\(0\.9, 2\.0\): entry 1 must be a number in \[0\.0, 1\.0\)"
    ):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("key", "value", "allowed"), [case for case in WRONG if case[0] not in ("clip_grad", "fused", "wd_mult")]
)
def test_a_loaded_group_is_checked_before_anything_changes(
    mlp, build, give, snapshot, key, value, allowed
) -> None:
    """A state dict is from a file that somebody wrote."""
    model = mlp()
    optimizer = build(model)
    give(model)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    before = snapshot(model, optimizer)
    for values in state["state"].values():
        values["exp_avg"] += 1.0
    state["param_groups"][0][key] = value
    with pytest.raises(StateDictError) as caught:
        optimizer.load_state_dict(state)
    assert str(caught.value) == (
        f"the state dict cannot be: the setting {key!r} of group 0 is {value!r} there: {allowed}"
    )
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_lr", -0.93, "param group 0: max_lr=-0.93: must be finite and not negative"),
        ("min_lr", 2.0, "param group 0: min_lr=2.0: must not be above max_lr=1.0"),
        ("end_wd", math.nan, "param group 0: end_wd=nan: must be finite and not negative"),
        ("wd_mult", "x", "param group 0: wd_mult='x': must be a number"),
    ],
)
def test_a_scheduler_checks_what_groups_say_since(mlp, build, key, value, message) -> None:
    """Learning rates stay as they were, and so does the number of steps."""
    optimizer = build(mlp())
    optimizer.param_groups[0]["max_lr"] = None
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 0, 10, "linear", 0.0, 0.0, 10, "constant")
    scheduler.step(1)
    group = optimizer.param_groups[0]
    before = group["lr"]
    group[key] = value
    with pytest.raises(ScheduleError) as caught:
        scheduler.step(1)
    assert str(caught.value) == message
    assert (group["lr"], scheduler.num_steps) == (before, 1)


class Checked(torch.optim.SGD):
    """An optimizer whose constructor refuses what its settings class does not know of."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.0,
        rounds: int = 1,
        kind: str = "a",
        shape: int = 2,
    ) -> None:
        if shape % 2:
            raise ValueError("shape must be even")
        super().__init__(params, lr, momentum=momentum)
        self.rounds, self.kind, self.shape = rounds, kind, shape


class CheckedPlugin:
    """Brings it."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        import attrs

        settings = attrs.make_class(
            "CheckedSettings",
            {
                "momentum": attrs.field(default=0.5, validator=between(0.0, 1.0)),
                "rounds": attrs.field(default=1, validator=whole_number(1)),
                "kind": attrs.field(default="a", validator=one_of(("a", "b"))),
            },
            frozen=True,
        )
        return {"checked": OptimizerEntry(Checked, settings=settings, setting_prefixes=("checked",))}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0: must be a number in [0.0, 1.0)"),
        ({"rounds": 0}, "rounds=0: must be an integer of at least 1"),
        ({"kind": "c"}, "kind='c': must be one of 'a', 'b'"),
        ({"shape": 3}, "Checked refuses {'shape': 3}: shape must be even"),
        ({"shape": "x"}, "Checked refuses {'shape': 'x'}: "),
    ],
)
def test_constructor_settings_of_an_override_pass_the_settings_class_and_the_constructor(
    override, message
) -> None:
    """Of third parties too, whatever they check where."""
    with temporary_plugin(CheckedPlugin(), "checked"):
        good = {"momentum": 0.2, "rounds": 2, "kind": "b", "shape": 4}
        model = nn.Linear(2, 2, bias=False)
        build_optimizer(model, "checked", lr=0.1, overrides={ParamKey(name="weight"): good})
        with pytest.raises(OverrideError) as caught:
            build_optimizer(model, "checked", lr=0.1, overrides={ParamKey(name="weight"): override})
    assert (
        str(caught.value).removeprefix("config_overrides: ParamKey(name=('weight',)): ").startswith(message)
    )


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(-2, 2),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.text(max_size=3),
    st.tuples(st.floats(-1, 2), st.floats(-1, 2)),
)


@pytest.mark.filterwarnings("ignore:no parameter has a gradient")
@given(key=st.sampled_from(["weight_decay", "betas", "eps", "amsgrad", "maximize"]), value=VALUES)
def test_what_an_override_may_hold_a_group_may_hold(key, value) -> None:
    """Override, later write and load agree on every value: all take it, or none does."""
    model = nn.Linear(2, 2, bias=False)
    settings = {"lr": 0.1, "weight_decay": 0.0, "clip_grad": 0.0}
    try:
        build_optimizer(model, "t_adam", overrides={ParamKey(name="weight"): {key: value}}, **settings)
        right = True
    except OverrideError:
        right = False
    optimizer = build_optimizer(model, "t_adam", overrides={}, **settings)
    state = copy.deepcopy(optimizer.state_dict())
    present, state["param_groups"][0][key] = state["param_groups"][0][key], value
    # A load writes what differs (0 is False) and is not None, and leaves what the configuration says.
    if key != "weight_decay" and value is not None and value != present:
        assert _takes(lambda: optimizer.load_state_dict(state), StateDictError) is right
    optimizer.param_groups[0][key] = value
    assert _takes(optimizer.step, ConfigurationError) is right


def _takes(action: Callable[[], object], refusal: type[Exception]) -> bool:
    try:
        action()
    except refusal:
        return False
    return True


@pytest.mark.parametrize("scheduled", [False, True])
def test_weight_decay_of_an_override_holds_with_a_schedule_and_without(build, mlp, scheduled) -> None:
    """A schedule writes weight decay into every group, and follows what a group has itself; `wd_mult` multiplies it."""
    overrides = {
        ParamKey(name="0.weight"): {"weight_decay": 0.4},
        ParamKey(name="2.weight"): {"weight_decay": 0.4, "wd_mult": 0.5},
    }
    optimizer = build(mlp(), overrides=overrides, weight_decay=0.1)
    if scheduled:
        OptimizerParamScheduler(
            optimizer,
            0.0,
            0.01,
            0.0,
            0,
            10,
            "linear",
            start_wd=0.0,
            end_wd=0.1,
            wd_incr_steps=4,
            wd_incr_style="linear",
        ).step(4)
    found = {
        optimizer.names[param]: group["weight_decay"]
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert found == {"0.weight": 0.4, "2.weight": 0.2, "0.bias": 0.1, "2.bias": 0.1}
