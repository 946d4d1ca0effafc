"""What a class does is found out by trying it."""

import made_up
import numpy as np
import pytest
import torch
from megaopt_bridge import probe
from megaopt_testing.process_state import random_states

from megaopt_core import OptimizerConfig, build_optimizer, get_registry, route
from megaopt_core.errors import PluginError

pytest.importorskip("megaopt_adam")
pytestmark = pytest.mark.any_python


@pytest.mark.parametrize(
    ("cls", "granularity", "alignment"),
    [
        (made_up.Plain, "element", 8),
        (made_up.Blockwise, "element", 256),
        (made_up.Normed, "tensor", 8),
        (made_up.LateNormed, "tensor", 8),
        (made_up.Matrices, "tensor", 8),
        (made_up.OfTheGroup, "group", 8),
        (made_up.OfAllGroups, "group", 8),
        (made_up.Noisy, "group", 8),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_how_finely_a_class_may_be_cut(cls, granularity, alignment) -> None:
    """By what it does, and with what settings it does it."""
    found = probe(cls, {"lr": 1e-2})
    assert (found.granularity.value, found.alignment) == (granularity, alignment)


class Tossing(torch.optim.SGD):
    """Draws one number of numpy's in every step, for all parameters alike."""

    def step(self, closure: None = None) -> None:
        """Step by a random factor."""
        factor = np.random.random()  # noqa: NPY002 - the one of the process
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] * factor)


def test_coins_of_numpy_are_seen_and_given_back() -> None:
    """Ranks toss their own: such a class is stepped whole, and a trial leaves the process's numbers as they were."""
    before = random_states()
    assert probe(Tossing, {"lr": 1e-2}).granularity.value == "group"
    assert random_states() == before


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_the_classes_of_torch_step_element_by_element(name) -> None:
    """All but Adafactor and Muon, whose updates look at rows and columns."""
    assert probe(getattr(torch.optim, name), {"lr": 1e-2}).granularity.value == "element"
    assert probe(torch.optim.Adafactor, {"lr": 1e-2}).granularity.value == "tensor"


def test_granularity_follows_the_settings_of_a_run() -> None:
    """A switch makes an element-wise class look at whole tensors; sharding sees that."""
    entry = get_registry().optimizer("made_up:Plain")
    plain = OptimizerConfig(optimizer="made_up:Plain", lr=0.1)
    normed = plain.replace(made_up_plain_mode="norm")
    assert [entry.configured(config).granularity.value for config in (plain, normed)] == ["element", "tensor"]
    specs = [route(config, [torch.nn.Linear(4, 3)]).params["weight"].spec for config in (plain, normed)]
    assert [spec.granularity.value for spec in specs] == ["element", "tensor"]


def test_tensors_that_it_refuses_go_to_adam() -> None:
    """By the number of their dimensions, with the class's own words."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    routing = route(OptimizerConfig(optimizer="made_up:Matrices", lr=0.1), [model])
    assert {name: param.spec.optimizer for name, param in routing.params.items()} == {
        "0.weight": "made_up:Matrices",
        "0.bias": "adam",
        "1.weight": "made_up:Matrices",
        "1.bias": "adam",
    }
    assert (
        "takes no tensors of 1 dimensions (ValueError: a matrix, please)" in routing.params["0.bias"].reason
    )


def test_what_a_first_step_puts_into_groups_is_there_from_the_beginning() -> None:
    """If that changes nothing; else it is left to the class."""
    model = torch.nn.Linear(4, 3)
    built = build_optimizer(model, "made_up:CountsInGroups", lr=0.1)
    assert [group["step"] for group in built.param_groups] == [0, 0]
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        built.step()
    assert [group["step"] for group in built.param_groups] == [2, 2]
    assert probe(made_up.CountsInGroups, {"lr": 0.1}).presets == {"step": 0}
    other = probe(made_up.LooksForItsCount, {"lr": 0.1})
    assert (dict(other.presets), other.unready) == ({}, {"step"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NeedsItsModel", "its constructor needs 'model', which megaopt cannot give"),
        ("NeedsAClosure", "its step needs a closure: it evaluates the model several times a step"),
        ("Fails", "it steps no dense tensor: RuntimeError: out of order"),
    ],
)
def test_what_cannot_be_stepped_is_refused_with_the_reason(name, why) -> None:
    """Before anything is built."""
    with pytest.raises(PluginError) as raised:
        get_registry().optimizer(f"made_up:{name}")
    assert str(raised.value) == f"optimizer 'made_up:{name}' cannot be used: {why}"


def test_a_trial_leaves_no_trace() -> None:
    """Random numbers and warnings are as they were."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    probe(torch.optim.RMSprop, {"lr": 1e-2})
    assert torch.equal(torch.rand(2), expected)


def test_a_step_without_gradients_is_not_counted() -> None:
    """A class that counts its calls is not called where no parameter has a gradient; others are."""
    assert probe(made_up.CountsInGroups, {"lr": 0.1}).counts_empty
    assert not probe(made_up.Plain, {"lr": 0.1}).counts_empty
    assert not probe(torch.optim.Adam, {"lr": 0.1}).counts_empty
    model = torch.nn.Linear(4, 3)
    built = build_optimizer(model, "made_up:CountsInGroups", lr=0.1)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        built.step()
    assert [group["step"] for group in built.param_groups] == [0, 0]
    model(torch.ones(1, 4)).sum().backward()
    built.step()
    assert [group["step"] for group in built.param_groups] == [1, 1]
