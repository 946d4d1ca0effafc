"""Cautious weight decay of Adam and AdamW."""

import copy

import pytest
import torch
from megaopt_adam.cautious import Adam, AdamW
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError
from megaopt_core.params import ParamKey

pytestmark = pytest.mark.any_python

LR, WD, BETAS, EPS = 0.05, 0.4, (0.8, 0.95), 1e-8


def gradients(count: int, shape: tuple[int, ...] = (13, 7)) -> list[torch.Tensor]:
    """Return random gradients, of which some elements are zero."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).relu() - 0.3 for _ in range(count)]


def stepped_in_float64(start: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the parameter after AdamW's formula with a decay that looks at the update's sign."""
    p = start.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, grad in enumerate(grads, 1):
        g = grad.double()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        update = m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        p = p - LR * WD * p * (update * p >= 0) - LR * update
    return p


@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop", "loop with gaps"])
def test_steps_follow_the_formula(cls: type[torch.optim.Adam], implementation: str) -> None:
    """Ten steps give the float64 formula, whichever of torch's implementations makes them."""
    start, grads = gradients(1)[0] + 0.1, gradients(10)
    has_gaps = implementation == "loop with gaps"
    memory = torch.stack((start, start), dim=-1)[..., 0] if has_gaps else start.clone()
    param = nn.Parameter(memory)
    decoupled = {"decoupled_weight_decay": True} if cls is Adam else {}
    which = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    optimizer = cls([param], LR, BETAS, EPS, WD, cautious_weight_decay=True, **which, **decoupled)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(param.double(), stepped_in_float64(start, grads), rtol=0, atol=2e-6)
    assert optimizer.param_groups[0]["weight_decay"] == WD


def test_without_caution_every_bit_is_torchs() -> None:
    """The class adds nothing to a step that is not asked to be cautious."""
    ours, theirs = (nn.Parameter(gradients(1)[0].clone()) for _ in range(2))
    pairs = [(ours, AdamW([ours], LR, BETAS)), (theirs, torch.optim.AdamW([theirs], LR, BETAS))]
    for grad in gradients(5):
        for param, optimizer in pairs:
            param.grad = grad.clone()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_hooks_run_once() -> None:
    """A step hook of the object runs once a step, although torch wraps the step of both classes."""
    param, calls = nn.Parameter(torch.ones(2)), []
    optimizer = AdamW([param], LR, cautious_weight_decay=True)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    param.grad = torch.ones(2)
    optimizer.step()
    assert calls == [1]


def test_a_failing_step_leaves_the_groups_as_they_were() -> None:
    """An error in torch's step does not switch off the decay of later ones."""
    param = nn.Parameter(torch.ones(2))
    optimizer = AdamW([param], LR, weight_decay=WD, cautious_weight_decay=True)
    param.grad = torch.ones(2)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    optimizer.state[param]["step"] = torch.zeros(())
    optimizer.state[param]["exp_avg"] = torch.zeros(2)
    with pytest.raises(KeyError, match="exp_avg_sq"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == WD


def test_an_override_makes_some_parameters_cautious() -> None:
    """The key stands in a group of its own, and only that group decays otherwise."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    before = [param.detach().clone() for param in model.parameters()]
    settings = {"lr": LR, "weight_decay": WD, "clip_grad": 0.0}
    optimizer = build_optimizer(
        model,
        "adam",
        overrides={ParamKey(name="0.*"): {"cautious_weight_decay": True}},
        **settings,
    )
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for number, param in enumerate(model.parameters()):
        p = before[number].double()
        shrinks = (p >= 0) if number == 0 else torch.ones_like(p, dtype=torch.bool)
        torch.testing.assert_close(param.double(), p - LR * WD * p * shrinks - LR, rtol=0, atol=1e-6)


def test_decay_added_to_the_gradient_is_refused() -> None:
    """With L2 there is no decay to be cautious with: the error says which setting helps."""
    settings = {"lr": LR, "cautious_weight_decay": True, "decoupled_weight_decay": False}
    with pytest.raises(ConfigurationError, match="with decoupled_weight_decay=False"):
        build_optimizer(nn.Linear(2, 2), "adam", **settings)


def test_an_optimizer_that_does_not_read_it_is_named() -> None:
    """SGD decays every weight: a warning and the report say so."""
    with pytest.warns(UserWarning, match="cautious_weight_decay=True: sgd does not read it"):
        optimizer = build_optimizer(nn.Linear(2, 2), "sgd", lr=LR, cautious_weight_decay=True)
    assert optimizer.report().unused_settings == ("cautious_weight_decay=True: sgd does not read it",)
    adam = build_optimizer(nn.Linear(2, 2), "adam", lr=LR, cautious_weight_decay=True)
    assert adam.report().unused_settings == ()


def test_state_goes_from_torchs_class_and_through_a_copy() -> None:
    """What torch's own AdamW saved loads, not cautious; a copy keeps the key."""
    param = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([param], LR)
    param.grad = torch.ones(3)
    theirs.step()
    ours = AdamW([param], LR)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["cautious_weight_decay"] is False
    ours.step()
    cautious = AdamW([param], LR, cautious_weight_decay=True)
    copied = copy.deepcopy(cautious)
    assert copied.param_groups[0]["cautious_weight_decay"] is True


def test_complex_parameters_decay_by_their_parts() -> None:
    """Real and imaginary parts are two numbers, as in torch's step."""
    start = torch.tensor([1 + 1j, -1 + 1j])
    param = nn.Parameter(start.clone())
    optimizer = AdamW([param], LR, weight_decay=WD, cautious_weight_decay=True)
    param.grad = torch.tensor([1 - 1j, 1 + 1j])
    optimizer.step()
    parts, signs = torch.view_as_real(start), torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    expected = parts - LR * WD * parts * (parts * signs >= 0) - LR * signs
    torch.testing.assert_close(torch.view_as_real(param.detach()), expected, rtol=0, atol=1e-6)
