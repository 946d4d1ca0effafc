"""A run that unfreezes, saves and resumes is the run that went on, to the bit; state of frozen parameters is kept."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt_core import OptimizerConfig, get_standard_config_overrides
from megaopt_core.errors import ConfigurationError, OwnershipError, StateDictError, UnsupportedOperationError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*trains since the optimizer was built:UserWarning"),
]

type Run = tuple[nn.ModuleDict, MegatronOptimizer]
type Make = Callable[..., Run]
PRECISIONS = {"fp32": (torch.float32, {}), "bf16": (torch.bfloat16, {"bf16": True})}


@pytest.fixture(
    params=[(precision, name) for precision in PRECISIONS for name in ("t_adam", "t_sgd", "t_momentum")],
    ids="-".join,
)
def make(build: Callable[..., Any], request: pytest.FixtureRequest) -> Make:
    """Return what makes a backbone and a head, and their optimizer."""
    dtype = PRECISIONS[request.param[0]][0]

    def run(*, frozen: bool) -> Run:
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(8, 4)}).to(dtype)
        backbone.requires_grad_(not frozen)
        overrides = get_standard_config_overrides(OptimizerConfig())
        return model, build(
            model, request.param[1], overrides=overrides, weight_decay=0.1, **PRECISIONS[request.param[0]][1]
        )

    return run


def train(run: Run, *steps: int) -> dict[str, torch.Tensor]:
    """Take steps whose gradients depend on their numbers alone; return the values after them."""
    model, optimizer = run
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=chance).to(param.dtype)
            param.grad = grad if param.requires_grad else None
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_state_dict(run: Run) -> tuple[Any, Any]:
    """Return copies of the state dicts of a model and its optimizer."""
    model, optimizer = run
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def load_state_dict(run: Run, saved: tuple[Any, Any]) -> None:
    """Load them."""
    run[0].load_state_dict(saved[0])
    run[1].load_state_dict(saved[1])


def has_states(run: Run) -> bool:
    """Return whether an optimizer has anything to lose: plain SGD has not."""
    states = (run[1].state[param].values() for param in run[0].parameters() if param in run[1].state)
    return any(isinstance(value, torch.Tensor) for state in states for value in state)


def unfrozen(make: Make, *, by_group: bool = False) -> Run:
    """Return a run that has unfrozen its backbone, and stepped it."""
    run = make(frozen=True)
    train(run, 0, 1)
    unfreeze(run, by_group=by_group)
    train(run, 2, 3)
    return run


def unfreeze(run: Run, *, by_group: bool = False) -> None:
    """Unfreeze the backbone."""
    model, optimizer = run
    model["backbone"].requires_grad_(True)
    if by_group:
        optimizer.add_param_group({"params": [*model["backbone"].parameters()], "lr": 1e-3})


@pytest.mark.parametrize("here", ["frozen", "trains", "frozen after", "twice", "group"])
def test_a_resumed_run_is_the_run_that_went_on(make, here) -> None:
    """Frozen or not at the resume, saved once more while it is frozen, unfrozen by a flag or by a group."""
    run = unfrozen(make, by_group=here == "group")
    saved = by_state_dict(run)
    expected = train(run, 4, 5)
    again = make(frozen=here not in ("trains", "frozen after"))
    again[0]["backbone"].requires_grad_(here == "trains")
    load_state_dict(again, saved)
    if here == "twice":
        saved, again = by_state_dict(again), make(frozen=True)
        load_state_dict(again, saved)
    unfreeze(again, by_group=here == "group")
    resumed = train(again, 4, 5)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert again[1].check() == ()


def _rename(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["param_names"][0] = "nobody"


def _spoil_setting(saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        group["weight_decay"] = float("nan")


def _spoil_shape(saved: dict[str, Any]) -> None:
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    saved["state"][names.index("head.weight")] = {"momentum_buffer": torch.zeros(3, 3)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(_rename, "nobody"), (_spoil_setting, "weight_decay"), (_spoil_shape, "head.weight")],
)
def test_a_failed_load_takes_nothing_in(make, spoil, words) -> None:
    """Whatever does not fit is found before a frozen parameter gets a place."""
    saved = by_state_dict(unfrozen(make))
    spoil(saved[1])
    again = make(frozen=True)
    before = [list(group["params"]) for group in again[1].param_groups]
    with pytest.raises(StateDictError, match=words):
        again[1].load_state_dict(saved[1])
    assert [list(group["params"]) for group in again[1].param_groups] == before


OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("here", ["trains", "frozen", "frozen after", "in place"])
def test_torchs_functions_lose_no_state(make, tmp_path, options, here) -> None:
    """They leave out states of what is frozen at a load: it is refused, or they were read into their places before."""
    run = make(frozen=False)
    train(run, 0, 1)
    if options.full_state_dict and not has_states(run):
        return  # torch itself takes no state dict without any tensor
    saved = copy.deepcopy((run[0].state_dict(), get_optimizer_state_dict(*run, options=options)))
    expected = train(run, 4, 5)
    again = make(frozen=here == "frozen")
    again[0].load_state_dict(saved[0])
    again[0]["backbone"].requires_grad_(here == "trains")
    state = saved[1]
    if here == "in place":
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        state = get_optimizer_state_dict(*again, options=options)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    if here in ("trains", "in place") or not has_states(run):
        set_optimizer_state_dict(*again, state, options=options)
        again[0]["backbone"].requires_grad_(True)
        resumed = train(again, 4, 5)
        assert all(torch.equal(resumed[name], value) for name, value in expected.items())
        return
    if here == "frozen" and options.flatten_optimizer_state_dict:
        return  # nothing in there tells of it where its group is not here
    if here == "frozen" and options.full_state_dict:
        with pytest.raises(KeyError, match="param_names"):  # torch's own, for groups that are not alike
            set_optimizer_state_dict(*again, state, options=options)
        return
    with pytest.raises(StateDictError, match=r"lacks the state of backbone.*frozen here"):
        set_optimizer_state_dict(*again, state, options=options)


def test_a_frozen_parameter_stays_as_it_is_after_a_resume(make) -> None:
    """Its state is kept, and moves nothing."""
    run = unfrozen(make)
    again = make(frozen=True)
    load_state_dict(again, by_state_dict(run))
    before = {name: value.clone() for name, value in again[0]["backbone"].state_dict().items()}
    train(again, 4, 5)
    after = again[0]["backbone"].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert again[1].check() == ()


def test_groups_are_added_with_their_own_settings(make) -> None:
    """As many as the settings of their parameters need; the last one's learning rate is that of all."""
    model, optimizer = run = make(frozen=True)
    train(run, 0)
    before = len(optimizer.param_groups)
    unfreeze(run, by_group=True)
    added = optimizer.param_groups[before:]
    assert [group["lr"] for group in added] == [1e-3] * len(added)
    assert {id(param) for group in added for param in group["params"]} == set(
        map(id, model["backbone"].parameters())
    )
    optimizer.param_groups[-1]["lr"] = 5e-4
    train(run, 1)
    assert [group["lr"] for group in added] == [5e-4] * len(added)
    added[0]["lr"] = 1e-5
    optimizer.param_groups[-1]["lr"] = 4e-4
    train(run, 2)
    assert (added[0]["lr"], added[-1]["lr"]) == (1e-5, 4e-4)


def test_groups_that_cannot_be_added(make) -> None:
    """One error each, before anything changes."""
    model, optimizer = make(frozen=True)
    backbone, head = [*model["backbone"].parameters()], [*model["head"].parameters()]
    groups = len(optimizer.param_groups)
    with pytest.raises(OwnershipError, match="would be in two groups"):
        optimizer.add_param_group({"params": head})
    with pytest.raises(OwnershipError, match="a parameter would be in two groups"):
        optimizer.add_param_group({"params": [backbone[0], backbone[0]]})
    for wrong, words in (
        ({"lr": None}, "lr=None"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"weight_decay": "x"}, "weight_decay"),
    ):
        with pytest.raises(ConfigurationError, match=f"add_param_group: .*{words}"):
            optimizer.add_param_group({"params": backbone, **wrong})
    for no_group in ({}, 3, {"params": []}):
        with pytest.raises(ConfigurationError, match="param_group"):
            optimizer.add_param_group(no_group)
    assert len(optimizer.param_groups) == groups
    assert not any(param.requires_grad for param in backbone)


def test_assigned_groups_give_settings_and_add_groups(make) -> None:
    """As Lightning restores them; groups that divide the parameters otherwise are refused."""
    run = unfrozen(make, by_group=True)
    saved = by_state_dict(run)
    described = [
        {**group, "params": [run[1].names[param] for param in group["params"]]}
        for group in run[1].param_groups
    ]
    expected = train(run, 4, 5)
    model, optimizer = again = make(frozen=True)
    params = dict(model.named_parameters())
    optimizer.param_groups = [
        {**group, "params": [params[name] for name in group["params"]]} for group in described
    ]
    load_state_dict(again, saved)
    unfreeze(again)
    resumed = train(again, 4, 5)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    with pytest.raises(UnsupportedOperationError, match="param_groups was assigned other groups"):
        optimizer.param_groups = optimizer.param_groups[1:]
    with pytest.raises(UnsupportedOperationError, match="param_groups was assigned other groups"):
        optimizer.param_groups = [{"params": [*params.values()], "lr": 0.1}]
