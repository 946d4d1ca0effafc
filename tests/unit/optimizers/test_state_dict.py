"""State dicts: torch's schema, torch's tools, names, and all or nothing."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from megaopt_core import FP32Optimizer, OptimizerConfig, ParamKey
from megaopt_core.errors import StateDictError
from megaopt_core.optimizers import MegatronOptimizer

CHAIN = {ParamKey(name="0.weight"): {"optimizer": "t_sgd"}, ParamKey(name="2.*"): {"optimizer": "t_momentum"}}
CASES = [
    pytest.param(torch.float32, {}, {}, id="fp32"),
    pytest.param(torch.float32, CHAIN, {}, id="chain"),
    pytest.param(torch.bfloat16, CHAIN, {"bf16": True}, id="bf16 chain"),
    pytest.param(torch.float16, {}, {"fp16": True, "initial_loss_scale": 4.0}, id="fp16"),
    pytest.param(torch.bfloat16, {}, {"bf16": True, "use_precision_aware_optimizer": True}, id="remainders"),
    pytest.param(
        torch.bfloat16,
        {},
        {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "fp16",
            "exp_avg_sq_dtype": "fp8",
        },
        id="narrow states",
    ),
]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, give: Callable[..., None], steps: range
) -> None:
    for step in steps:
        give(model, step)
        optimizer.step()


def _resumed(
    mlp: Callable[..., nn.Module],
    build: Callable[..., MegatronOptimizer],
    give: Callable[..., None],
    dtype: torch.dtype,
    overrides: Mapping[ParamKey, Mapping[str, Any]],
    settings: Mapping[str, Any],
    carry: Callable[..., None],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return parameters of a run through, and of one whose state went through `carry(model, from, to)`."""
    through, cut = mlp(dtype), mlp(dtype)
    _train(through, build(through, overrides=overrides, **settings), give, range(6))
    first = build(cut, overrides=overrides, **settings)
    _train(cut, first, give, range(3))
    resumed = mlp(dtype, seed=3)
    resumed.load_state_dict(cut.state_dict())
    second = build(resumed, overrides=overrides, **settings)
    carry(cut, first, resumed, second)
    _train(resumed, second, give, range(3, 6))
    return list(through.parameters()), list(resumed.parameters())


@pytest.mark.parametrize(("dtype", "overrides", "settings"), CASES)
def test_a_file_continues_the_run_bit_for_bit(mlp, build, give, dtype, overrides, settings) -> None:
    """Through torch.save and torch.load(weights_only=True)."""

    def carry(_, first, __, second) -> None:
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))

    for mine, other in zip(*_resumed(mlp, build, give, dtype, overrides, settings, carry), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("dtype", "overrides", "settings", "flatten"),
    [
        pytest.param(*case.values, flatten, id=f"{case.id}{' flat' if flatten else ''}")
        for case in CASES
        for flatten in (False, True)
        if not (flatten and case.values[1])  # torch flattens groups of one kind only
    ],
)
def test_torchs_checkpoint_helpers_continue_the_run(
    mlp, build, give, dtype, overrides, settings, flatten
) -> None:
    """`get_optimizer_state_dict` and `set_optimizer_state_dict` carry a state over by name."""
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flatten)

    def carry(model, first, resumed, second) -> None:
        state = dcp.get_optimizer_state_dict(model, first, options=options)
        dcp.set_optimizer_state_dict(resumed, second, copy.deepcopy(state), options=options)

    for mine, other in zip(*_resumed(mlp, build, give, dtype, overrides, settings, carry), strict=True):
        assert torch.equal(mine, other)


def test_reading_a_state_dict_does_not_step(mlp, build) -> None:
    """Torch's helpers make missing state by stepping; here all state exists."""
    model = mlp()
    optimizer = build(model, "t_sgd")
    before = [param.detach().clone() for param in model.parameters()]
    dcp.get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_plain_torch_state_dict_is_loaded_by_position(mlp, build, give) -> None:
    """A run with torch's AdamW goes on here, with the implementation that this optimizer was built with."""
    theirs, ours = mlp(), mlp()
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.02, foreach=True, weight_decay=0.3)
    _train(theirs, plain, give, range(3))
    ours.load_state_dict(theirs.state_dict())
    optimizer = build(ours)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["foreach"] is False
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.02, 0.3)
    _train(theirs, plain, give, range(3, 6))
    _train(ours, optimizer, give, range(3, 6))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_torchs_optimizer_loads_ours(mlp, build, give) -> None:
    """The way back is open too."""
    ours, theirs = mlp(), mlp()
    optimizer = build(ours)
    _train(ours, optimizer, give, range(3))
    theirs.load_state_dict(ours.state_dict())
    plain = torch.optim.AdamW(theirs.parameters(), foreach=False)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(ours, optimizer, give, range(3, 5))
    _train(theirs, plain, give, range(3, 5))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


def test_a_plain_state_starts_main_parameters_from_the_model(mlp, build, give) -> None:
    """Torch's AdamW on a bf16 model has no main parameters: the model's values are all there is."""
    theirs, ours = mlp(torch.bfloat16), mlp(torch.bfloat16, seed=9)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    _train(theirs, plain, give, range(2))
    optimizer = build(ours, bf16=True)
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    for param in ours.parameters():
        assert torch.equal(optimizer.state[param]["main_param"], param.float())


def test_states_move_between_policies(mlp, build, give) -> None:
    """Narrow, split and full storage hold the same logical values, as far as their bits go."""
    settings = [
        {"bf16": True},
        {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp16"},
        {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": False},
    ]
    for source in settings:
        for target in settings:
            model, other = mlp(torch.bfloat16), mlp(torch.bfloat16)
            first, second = build(model, **source), build(other, **target)
            _train(model, first, give, range(3))
            other.load_state_dict(model.state_dict())
            second.load_state_dict(first.state_dict())
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                old, new = first.state[mine], second.state[its]
                assert torch.equal(old["main_param"], new["main_param"])
                torch.testing.assert_close(
                    old["exp_avg"].float(), new["exp_avg"].float(), rtol=1e-3, atol=1e-6
                )


def test_groups_are_matched_by_name_whatever_their_order(mlp, build, give) -> None:
    """Another way to group the same parameters loads the same settings and states."""
    model, other = mlp(), mlp()
    first = build(model, overrides={ParamKey(name="2.*"): {"lr": 0.5}})
    second = build(other, overrides={ParamKey(name="*.bias"): {"lr": 0.7}})
    _train(model, first, give, range(2))
    with pytest.warns(UserWarning, match="group 0: .*lr=0.01 stays .*group 1: .*lr=0.7 stays"):
        second.load_state_dict(first.state_dict())
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first.state[mine]["exp_avg"], second.state[its]["exp_avg"])
        assert second.state[its]["step"].item() == 2.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("state"), "an optimizer state dict has the keys 'state' and 'param_groups'"),
        (
            lambda state: state["state"][3].update(exp_avg=torch.zeros(4)),
            "state 'exp_avg' of '2.bias' in the state dict has shape (4,), here it has shape (3,)",
        ),
        (
            lambda state: state["state"][3].update(exp_avg="x"),
            "state 'exp_avg' of '2.bias' in the state dict is a number there and has its parameter's shape here",
        ),
        (
            lambda state: state["state"][3].pop("exp_avg_sq"),
            "the state dict lacks state that the optimizer keeps here: 2.bias: exp_avg_sq; strict=False lets it start "
            "anew",
        ),
        (
            lambda state: state["param_groups"][0]["param_names"].__setitem__(3, "2.gain"),
            "the state dict does not fit: it lacks 2.bias (state); it has 2.gain (state), which is not here. "
            "strict=False loads the parts that fit, and rename= of load_checkpoint maps old names to new ones",
        ),
        (
            lambda state: state["param_groups"][0]["param_names"].pop(),
            "the state dict names 3 parameters but lists 4",
        ),
        (lambda state: state["state"].update({3: 1.0}), "the state of '2.bias' is no mapping"),
        (
            lambda state: state.update(fresh=5),
            "'fresh' of an optimizer state dict is a list of parameter names, got int 5",
        ),
        (
            lambda state: state.update(fresh=["2.bias", ["0.bias"]]),
            "'fresh' of an optimizer state dict is a list of parameter names, got list ['2.bias', ['0.bias']]",
        ),
        (
            lambda state: (
                state["param_groups"][0].pop("param_names"),
                state["param_groups"][0]["params"].pop(),
            ),
            "the state dict has 3 parameters without names, in groups of 3; this optimizer has 4, in groups of 4. "
            "Without names only the position can match them. Build both with the same groups, or give all trainable "
            "parameters of the model as one group. Or save names: a torch.optim class that gets "
            "model.named_parameters() has param_names",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(mlp, build, give, snapshot, spoil, message) -> None:
    """Everything is checked before the first value is written."""
    source, target = mlp(), mlp()
    first, second = build(source), build(target)
    _train(source, first, give, range(3))
    _train(target, second, give, range(1))
    state = copy.deepcopy(first.state_dict())
    spoil(state)
    before = snapshot(target, second)
    with pytest.raises(StateDictError) as caught:
        second.load_state_dict(state)
    assert str(caught.value) == message
    assert snapshot(target, second) == before


def test_a_scaler_that_cannot_be_read_changes_nothing(mlp, build, give, snapshot) -> None:
    """The scaler is read before parameters are written."""
    model = mlp(torch.float16)
    optimizer = build(model, fp16=True, initial_loss_scale=4.0)
    _train(model, optimizer, give, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["grad_scaler"] = {"scale": 1.0}
    state["state"][0]["exp_avg"] += 1
    before = snapshot(model, optimizer)
    with pytest.raises(StateDictError, match="lacks"):
        optimizer.load_state_dict(state)
    assert snapshot(model, optimizer) == before


def test_not_strict_loads_what_fits(mlp, build, give) -> None:
    """Parameters that were added keep their fresh state."""
    small, large = mlp(), nn.Sequential(*mlp(), nn.Linear(3, 2))
    first, second = build(small), build(large)
    _train(small, first, give, range(2))
    second.load_state_dict(first.state_dict(), strict=False)
    assert torch.equal(second.state[large[2].bias]["exp_avg"], first.state[small[2].bias]["exp_avg"])
    assert not second.state[large[3].bias]["exp_avg"].any()


def test_another_optimizers_state_is_refused(mlp, build, give) -> None:
    """Adam's moments are not SGD's momentum."""
    source, target = mlp(), mlp()
    first, second = build(source), build(target, "t_momentum")
    _train(source, first, give, range(1))
    saved = first.state_dict()
    with pytest.raises(
        StateDictError, match=r"'0\.weight': it was stepped by 't_adam', here by 't_momentum'"
    ):
        second.load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["routed"]  # as torch's own, which do not say who stepped
    with pytest.raises(StateDictError, match=r"lacks state that .* keeps here: .*0\.weight: momentum_buffer"):
        second.load_state_dict(saved)


def test_a_state_that_another_optimizer_could_hold_is_refused(mlp, build, give, snapshot) -> None:
    """Keys and shapes that fit are not enough: what a missing reader of roles reroutes does not load in silence."""
    source, target = mlp(), mlp()
    first, second = build(source), build(target, overrides=CHAIN)
    _train(source, first, give, range(1))
    _train(target, second, give, range(2))
    before = snapshot(target, second)
    with pytest.raises(StateDictError, match=r"'0\.weight': it was stepped by 't_adam', here by 't_sgd'"):
        second.load_state_dict(first.state_dict())
    assert snapshot(target, second) == before
    second.load_state_dict(first.state_dict(), strict=False)
    assert torch.equal(second.state[target[0].bias]["exp_avg"], first.state[source[0].bias]["exp_avg"])


def test_a_state_dict_names_who_stepped_and_who_read_the_roles(mlp, build, give) -> None:
    """What is not installed here comes with the line that installs it."""
    source, target = mlp(), mlp()
    first = build(source)
    _train(source, first, give, range(1))
    saved = first.state_dict()
    assert {group["routed"]["optimizer"] for group in saved["param_groups"]} == {"t_adam"}
    gone = _told(saved, {"optimizer": "gone", "distribution": "its-plugin", "roles": "a reader 1.0"})
    with pytest.raises(
        StateDictError, match=r"'gone' of its-plugin, .* \(pip install its-plugin\); strict=False"
    ):
        build(target).load_state_dict(gone)
    other = _told(saved, {"optimizer": "t_sgd", "distribution": "", "roles": "a reader 1.0"})
    with pytest.raises(StateDictError, match=r"otherwise \(roles read by a reader 1\.0 there, by .* here\)"):
        build(target).load_state_dict(other)


def test_torchs_helpers_carry_who_stepped(mlp, build, give) -> None:
    """So what they bring is compared, too."""
    source, target = mlp(), mlp()
    first, second = build(source), build(target, overrides=CHAIN)
    _train(source, first, give, range(1))
    saved = dcp.get_optimizer_state_dict(source, first)
    with pytest.raises(StateDictError, match=r"'0\.weight': it was stepped by 't_adam', here by 't_sgd'"):
        dcp.set_optimizer_state_dict(target, second, saved)


def _told(state_dict: Mapping[str, Any], routed: object) -> dict[str, Any]:
    """Return a state dict whose groups say something else of who stepped them."""
    return {
        **state_dict,
        "param_groups": [{**group, "routed": routed} for group in state_dict["param_groups"]],
    }


@pytest.mark.parametrize(
    "told",
    [3, {"optimizer": "t_adam"}, {"optimizer": 1, "distribution": "", "roles": ""}],
    ids=["number", "half", "no text"],
)
def test_what_cannot_say_who_stepped_is_refused(mlp, build, told) -> None:
    """It is named, with what it should tell."""
    optimizer = build(mlp())
    with pytest.raises(
        StateDictError, match=r"^'routed' of a param group .* tells optimizer, distribution and"
    ):
        optimizer.load_state_dict(_told(optimizer.state_dict(), told))


def test_tensors_stay_and_learning_rate_tensors_are_filled(mlp, build, give) -> None:
    """Loading writes into the tensors that exist: whoever holds one sees the new value."""
    model = mlp()
    optimizer = build(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    held = optimizer.state[model[0].bias]["exp_avg"], optimizer.param_groups[0]["lr"]
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"] += 1.0
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert held[0].unique().tolist() == [1.0]
    assert held[1].item() == 0.25
    assert optimizer.param_groups[0]["lr"] is held[1]


def test_state_dict_hooks_fire_as_in_torch(mlp, build) -> None:
    """All four kinds."""
    optimizer = build(mlp())
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: seen.append("post") or {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: seen.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("load post"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["pre", "post", "load pre", "load post"]


def test_what_an_optimizer_makes_late_is_loaded_early() -> None:
    """State that appears in the first step only is taken from the file."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    config = OptimizerConfig(clip_grad=0.0)
    first, second = (
        FP32Optimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9), config, lambda *_: None)
        for weight in weights
    )
    for _ in range(2):
        weights[0].grad = torch.ones(2)
        first.step()
    second.load_state_dict(first.state_dict())
    assert torch.equal(
        second.state[weights[1]]["momentum_buffer"], first.state[weights[0]]["momentum_buffer"]
    )


@pytest.mark.parametrize("name", ["t_adam", "t_momentum"])
def test_what_was_loaded_is_a_copy(mlp, build, give, name) -> None:
    """The run that a state dict came from goes on by itself, also where state was made by the load."""
    models = [mlp(), mlp()]
    first, second = (build(model, name) for model in models)
    _train(models[0], first, give, range(2))
    second.load_state_dict(first.state_dict())
    kept = copy.deepcopy(first.state_dict()["state"])
    _train(models[1], second, give, range(2, 5))
    for index, state in first.state_dict()["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(kept[index][key]))
            for key, value in state.items()
        )


def test_a_state_dict_from_before_the_first_step_is_no_state_for_a_later_one(mlp, build, give) -> None:
    """Torch's own says nothing of parameters that were not stepped."""
    source, target = mlp(), mlp()
    plain, optimizer = torch.optim.AdamW(source.parameters()), build(target)
    _train(target, optimizer, give, range(1))
    with pytest.raises(
        StateDictError, match=r"has no state of '0\.weight', which has been stepped here; strict=False"
    ):
        optimizer.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(plain.state_dict(), strict=False)
    assert optimizer.state[target[0].weight]["step"].item() == 1.0


def test_torchs_checkpoints_are_compared_by_optimizer(mlp, build, give) -> None:
    """As files are: what another optimizer made is refused, with both names and before anything is written."""
    source, target = mlp(), mlp()
    first, second = build(source), build(target, overrides=CHAIN)
    _train(source, first, give, range(1))
    _train(target, second, give, range(1))
    before = copy.deepcopy(second.state_dict()["state"])
    saved = first.checkpoint_state().state_dict()
    with pytest.raises(StateDictError, match=r"'0\.weight': it was stepped by 't_adam', here by 't_sgd'"):
        second.checkpoint_state().load_state_dict(saved)
    assert second.state_dict()["state"].keys() == before.keys()


def test_a_nameless_state_of_one_group_is_in_the_order_of_the_model(build, give) -> None:
    """Groups that are made by settings change no parameter's place; shapes that agree do not hide it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    alone = copy.deepcopy(model)
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.01)
    give(alone)
    theirs.step()
    ours = build(model, overrides={ParamKey(name="0.weight"): {"max_lr": 0.5}})
    ours.load_state_dict(theirs.state_dict())
    assert len(ours.param_groups) == 2
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.state[mine]["exp_avg"], theirs.state[other]["exp_avg"])


@pytest.mark.parametrize("sizes", [(1, 2), (1, 1, 1)])
def test_a_nameless_state_of_other_groups_is_refused(build, give, sizes) -> None:
    """As torch refuses it, also where shapes would agree."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    params = iter(list(model.parameters()))
    theirs = torch.optim.AdamW([{"params": [next(params) for _ in range(size)]} for size in sizes])
    give(model)
    theirs.step()
    ours = build(model, overrides={ParamKey(name="0.weight"): {"max_lr": 0.5}})
    with pytest.raises(
        StateDictError, match=rf"in groups of {', '.join(map(str, sizes))}; this optimizer has 3, in"
    ):
        ours.load_state_dict(theirs.state_dict())


def test_settings_of_groups_that_have_become_one_are_named(build, give) -> None:
    """What differed between them stays as it is here, and a warning says so."""
    model, other = (
        torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(2))) for _ in range(2)
    )
    saved = build(model, overrides={ParamKey(name="0.weight"): {"max_lr": 0.5}}, lr=0.1)
    give(model)
    saved.step()
    for group in saved.param_groups:
        group["lr"] *= 0.01
        group["eps"] = 1e-5
    loaded = build(other, lr=0.1)
    with pytest.warns(UserWarning, match=r"group 0: lr=0\.1 stays \(0\.001, 0\.005\)"):
        loaded.load_state_dict(saved.state_dict())
    assert (loaded.param_groups[0]["lr"], loaded.param_groups[0]["eps"]) == (0.1, 1e-5)


@pytest.mark.parametrize(("dtype", "overrides", "settings"), CASES)
def test_live_groups_have_the_names_that_a_state_dict_has(
    mlp, build, give, dtype, overrides, settings
) -> None:
    """As torch's have, so that a state dict that somebody has flattened by name finds its way back."""
    model = mlp(dtype)
    optimizer = build(model, overrides=overrides, **settings)
    _train(model, optimizer, give, range(1))
    names = {param: name for name, param in model.named_parameters()}
    live = [group["param_names"] for group in optimizer.param_groups]
    assert live == [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    assert live == [group["param_names"] for group in optimizer.state_dict()["param_groups"]]


def test_live_groups_name_what_was_wrapped_or_began_to_train(mlp, build, give) -> None:
    """The name that the optimizer knows it by."""
    wrapped = FP32Optimizer(torch.optim.AdamW(mlp().parameters()), OptimizerConfig())
    model = mlp()
    model[0].weight.requires_grad_(requires_grad=False)
    late = build(model)
    model[0].weight.requires_grad_()
    give(model)
    with pytest.warns(UserWarning, match=r"'0\.weight' trains since"):
        late.step()
    assert "0.weight" in {name for group in late.param_groups for name in group["param_names"]}
    for optimizer in (wrapped, late):
        for group in optimizer.param_groups:
            assert group["param_names"] == [optimizer.names[param] for param in group["params"]]
