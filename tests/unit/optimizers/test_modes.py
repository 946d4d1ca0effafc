"""Optimizers with modes, and optimizers that change their own groups."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.errors import PluginNotInstalledError

pytestmark = pytest.mark.any_python


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose training weights are an interpolation; evaluation uses the average, as schedule-free methods do."""

    def __init__(self, params: ParamsT, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for param in group["params"]:
                    z = self.state[param]["z"]
                    weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                    param.lerp_(z, weight)
                group["train_mode"] = training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step in evaluation mode")
            weight = 1 / (group["k"] + 1)
            for param in group["params"]:
                if "z" not in self.state[param]:
                    self.state[param]["z"] = param.detach().clone()
                if param.grad is None:
                    continue
                z = self.state[param]["z"]
                param.lerp_(z, weight)
                param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1


class ProdigyLike(torch.optim.Optimizer):
    """SGD whose step size `d` is estimated over the whole group and kept in it."""

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            group["d"] *= 1.0 + float(sum(grad.square().sum() for grad in grads)) / 1000.0
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * group["d"])


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "schedule_free": OptimizerEntry(ScheduleFree),
            "prodigy_like": OptimizerEntry(ProdigyLike, granularity="group"),
        }


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register the two."""
    with temporary_plugin(Plugin(), "modes"):
        yield


POLICIES = [
    (torch.float32, {}),
    (torch.bfloat16, {"bf16": True}),
    (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
]


@pytest.mark.parametrize(("dtype", "settings"), POLICIES)
def test_modes_reach_the_model(mlp, build, give, dtype, settings) -> None:
    """`eval` shows averaged weights, `train` goes on as if it had not been; both as the optimizer itself would."""
    ours, theirs = mlp(dtype), mlp(dtype).float()
    optimizer = build(ours, "schedule_free", lr=0.1, **settings)
    alone = ScheduleFree(theirs.parameters(), lr=0.1)
    for step in range(3):
        give(ours, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.float()
        optimizer.step()
        alone.step()
        optimizer.eval()
        alone.eval()
        assert optimizer.param_groups[0]["train_mode"] is False
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(
                mine.float(), other, rtol=1e-2 if settings else 0, atol=1e-3 if settings else 0
            )
        optimizer.train()
        alone.train()
        assert optimizer.param_groups[0]["train_mode"] is True
    for mine, other in zip(optimizer.get_parameters(), theirs.parameters(), strict=True):
        main = optimizer.state[mine].get("main_param", mine)
        torch.testing.assert_close(main, other.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "settings"), POLICIES)
def test_modes_survive_small_batches(mlp, build, give, monkeypatch, dtype, settings) -> None:
    """Every batch of a precision-aware optimizer switches, not the first alone."""
    monkeypatch.setattr("megaopt_lowbit.policy.BATCH_ELEMENTS", 10)
    model = mlp(dtype)
    optimizer = build(model, "schedule_free", lr=0.1, **settings)
    for step in range(2):
        give(model, step)
        optimizer.step()
    trained = [param.detach().clone() for param in model.parameters()]
    optimizer.train(False)
    averaged = [param.detach().clone() for param in model.parameters()]
    optimizer.train()
    assert not any(torch.equal(*pair) for pair in zip(trained, averaged, strict=True))
    for before, after in zip(trained, model.parameters(), strict=True):
        torch.testing.assert_close(before, after.detach(), rtol=1e-2, atol=1e-4)


def test_optimizers_without_modes_ignore_them(mlp, build) -> None:
    """`train` and `eval` may be called on any optimizer."""
    optimizer = build(mlp())
    optimizer.eval()
    optimizer.train()


@pytest.mark.parametrize(("dtype", "settings"), POLICIES)
def test_a_group_that_its_optimizer_changes_is_the_public_one(
    mlp, build, give, monkeypatch, dtype, settings
) -> None:
    """`d` grows once a step, over the whole group, and shows in `param_groups`; writing it back holds too."""
    monkeypatch.setattr("megaopt_lowbit.policy.BATCH_ELEMENTS", 10)
    ours, theirs = mlp(dtype), mlp(dtype).float()
    optimizer, alone = (
        build(ours, "prodigy_like", lr=1.0, **settings),
        ProdigyLike(theirs.parameters(), lr=1.0),
    )
    assert optimizer.param_groups[0]["d"] == 1e-3
    for step in range(3):
        give(ours, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.float()
        optimizer.step()
        alone.step()
        assert optimizer.param_groups[0]["d"] == pytest.approx(alone.param_groups[0]["d"], rel=1e-6)
    optimizer.param_groups[0]["d"] = 0.0
    before = [param.detach().clone() for param in ours.parameters()]
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, ours.parameters(), strict=True))


def test_modes_in_a_chain(mlp, build, give) -> None:
    """Children with modes switch, the others do not care."""
    from megaopt_core import ParamKey

    model = mlp()
    optimizer = build(model, "schedule_free", overrides={ParamKey(name="2.*"): {"optimizer": "t_sgd"}})
    give(model)
    optimizer.step()
    give(model, 1)
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.eval()
    assert [torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)] == [
        False,
        False,
        True,
        True,
    ]


def test_an_optimizer_that_needs_closures_is_refused(build) -> None:
    """One that evaluates the model several times a step cannot be a stage of a pipeline."""
    from megaopt_core.errors import PluginError

    class Probing(torch.optim.SGD):
        def step(self, closure):
            return closure()

    class Brings:
        megaopt_api = "1"

        @hookimpl
        def megaopt_optimizer_entries(self):
            return {"probing": OptimizerEntry(Probing)}

    with temporary_plugin(Brings(), "probing"), pytest.raises(PluginError) as caught:
        build(nn.Linear(2, 2), "probing")
    assert str(caught.value) == (
        "optimizer 'probing' of plugin 'probing' (Brings): Probing.step needs a closure, because it evaluates the "
        "model several times a step; megaopt collects gradients, clips and steps once"
    )


def test_without_megaopt_device_states_stay(mlp, build, give, monkeypatch) -> None:
    """Its absence is said in one sentence, nothing has moved, and there is nothing to bring back."""
    monkeypatch.setitem(sys.modules, "megaopt_device", None)
    model = mlp()
    optimizer = build(model)
    give(model)
    with pytest.raises(
        PluginNotInstalledError,
        match=r"^optimizer\.offload_to_cpu\(\) comes with megaopt-device, which is .*: pip install megaopt-device$",
    ):
        optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()
    assert optimizer.step().update_successful
