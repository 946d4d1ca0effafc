"""How an example is run: without values where that is possible, else with copies of those of a small model."""

import warnings
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megaopt_roles.example import meetings, run
from torch import nn

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

SOURCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 9)
        self.norm, self.plain = nn.BatchNorm1d(6), torch.zeros(6)
    def forward(self, x):
        loss, given = 0, x
        h = self.norm(x + self.down(self.up(x).relu()))
        {line}
        return {{"logits": self.head(h), "loss": loss}}
"""
X = torch.linspace(-1.0, 1.0, 30).reshape(5, 6)

LINES = {
    "nothing": "pass",
    "two losses": "y = self.head(h); loss = y.pow(2).mean() + y.abs().sum()",
    "a number of several": "y = self.head(h); loss = sum(part.mean() for part in y.unbind()) + F.mse_loss(y, y * 0)",
    "a branch": "h = h * 2 if h.sum() > 1e9 else h",
    "any": "h = h + 1 if (h > 1e9).any() else h",
    "a count": "h = h + torch.zeros(int(given.argmax()) + 1).sum()",
    "a mask": "h = h[h[:, 0] > -1e9]",
    "where": "h = h[torch.where(h[:, 0] > -1e9)[0]]",
    "non-zero": "h = h[(h[:, 0] > -1e9).nonzero().squeeze(-1)]",
    "bins": "h = h + torch.bincount(given.argmax(-1), minlength=6)",
    "a list": "h = h[: sum(h.argmax(-1).tolist()) + 9]",
    "repeated rows": "h = h.repeat_interleave(torch.ones(5, dtype=torch.long), 0)",
    "chance": "h = h if torch.rand(()) < 2 else h * 0",
    "a density": "y = self.head(h); loss = -torch.distributions.Normal(y, y.exp()).log_prob(y * 0).mean()",
    "a sample": "h = h + torch.distributions.OneHotCategorical(logits=h.detach()).sample()",
    "alignments": "loss = F.ctc_loss(self.head(h).log_softmax(-1)[:, None], torch.ones(1, 1).long(), [5], [1])",
    "a plain tensor": "h = h + self.plain",
    "a derivative": "given.requires_grad_()\n        "
    "h = h + torch.autograd.grad((given @ given.T).sum(), given, create_graph=True)[0]",
    "its function": "from torch.autograd import grad\n        "
    "loss = grad(outputs=self.head(h).sum(), inputs=[given.requires_grad_()])[0].mean()",
    "a functional derivative": "h = h + torch.func.grad(lambda x: x.pow(2).sum())(given)",
}


def unread(line: str) -> nn.Module:
    """Return a model without a source that can be read, of whose forward this is a line."""
    scope = {"nn": nn, "torch": torch, "F": F}
    exec(SOURCE.format(line=line), scope)  # noqa: S102 - the point is a class without a source
    model: nn.Module = scope["Model"]()  # type: ignore[operator]
    return model


def told(found: dict[str, RoleDecision]) -> dict[str, tuple[Role, Doubt]]:
    """Return what is said of the weights of the three layers."""
    return {
        name: (found[f"{name}.weight"].role, found[f"{name}.weight"].doubt) for name in ("up", "down", "head")
    }


@pytest.mark.parametrize("case", LINES)
def test_what_forwards_do_on_the_way(case: str) -> None:
    """Whatever else a forward does, the example is run without a warning, and shows what each layer is."""
    model = unread(LINES[case])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = infer_roles(model, example=X.clone())
    assert told(found) == {
        "up": (Role.MATRIX, Doubt.NONE),
        "down": (Role.MATRIX, Doubt.NONE),
        "head": (Role.OUTPUT, Doubt.NONE),
    }


@pytest.mark.parametrize("case", ["a branch", "chance", "a sample", "a density"])
def test_a_run_with_values_changes_nothing(case: str) -> None:
    """Parameters, running statistics, gradients, the batch, the generator and torch's settings stay as they were."""
    model, batch = unread(LINES[case]), X.clone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    checks = torch.distributions.Distribution._validate_args
    infer_roles(model, example=batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(batch, X)
    assert not batch.requires_grad
    assert torch.distributions.Distribution._validate_args is checks
    assert torch.backends.mkldnn.enabled


def test_a_parameter_that_the_forward_moves_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward writes into parameters, it writes into copies."""
    model = unread("self.head.weight.mul_(2.0 if h.sum() > -1e9 else 1.0)")
    before = model.head.weight.clone()  # type: ignore[operator,union-attr]
    infer_roles(model, example=X)
    assert torch.equal(before, model.head.weight)  # type: ignore[arg-type]


def test_recurrent_layers_with_values() -> None:
    """One kernel for a whole recurrent layer would hide its products."""
    model = unread("h = self.lstm(h)[0] if h.sum() > -1e9 else h")
    model.lstm = nn.LSTM(6, 6)
    found = infer_roles(model, example=X)
    assert found["lstm.weight_ih_l0"].role is found["lstm.weight_hh_l0"].role is Role.MATRIX


def test_a_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs values keeps what was read, and a warning says why."""
    monkeypatch.setattr(run, "_LARGEST", 100)
    model = unread(LINES["a branch"])
    with pytest.warns(
        UserWarning, match=r"not be run on the meta device .*its \d+ elements are more than the 100"
    ):
        found = infer_roles(model, example=X)
    assert found == infer_roles(model)


def test_a_large_batch_is_not_run_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run with values makes is kept until its end: no more of it than a part of a machine's memory."""
    monkeypatch.setattr(meetings, "MOST_BYTES", 2000)
    model = unread(LINES["a branch"])
    with pytest.warns(UserWarning, match="nor with a copy .*more than 2000 bytes; give a smaller batch"):
        found = infer_roles(model, example=X)
    assert found == infer_roles(model)


def test_a_model_without_values() -> None:
    """One on the meta device that needs them keeps what was read."""
    model = unread(LINES["a branch"]).to("meta")
    with pytest.warns(UserWarning, match="on the meta device .*and the model has no values"):
        found = infer_roles(model, example=X)
    assert found == infer_roles(model)


def test_a_forward_that_fails() -> None:
    """The warning tells both errors."""
    model = unread("raise ValueError('no' if h.sum() > -1e9 else 'yes')")
    with pytest.warns(
        UserWarning, match=r"meta device \(RuntimeError: .*\), nor with a copy .*\(ValueError: no\)"
    ):
        found = infer_roles(model, example=X)
    assert found == infer_roles(model)


def test_a_weight_that_activations_are_added_to(generated_models: ModuleType) -> None:
    """What a hypernetwork moves stays what the source says: the example shows a sum, as with a positional table."""
    made = (
        "self.base, self.position = nn.Parameter(torch.zeros(8, 6)), nn.Parameter(torch.zeros(5, 6))\n"
        "self.make, self.head = nn.Linear(6, 48), nn.Linear(8, 3)"
    )
    forward = (
        "def forward(self, x):\n    x = x + self.position\n    w = self.base + self.make(x.mean(0)).view(8, 6)\n"
        "    return self.head(F.linear(x, w).relu())"
    )
    model = generated_models.model(made, forward)()
    read, shown = infer_roles(model), infer_roles(model, example=X)
    assert shown["base"] == read["base"]
    assert (shown["position"].role, shown["position"].doubt) == (Role.ELEMENTWISE, Doubt.NONE)


def test_edges_of_a_graph_stay_in_doubt(generated_models: ModuleType) -> None:
    """A weight under something fixed, for a sum over positions: that a product contracts it, the source knows."""
    made = (
        "self.edges = nn.Parameter(torch.ones(2, 5, 5))\nself.register_buffer('graph', torch.ones(2, 5, 5))\n"
        "self.up, self.head = nn.Linear(6, 16), nn.Linear(8, 3)"
    )
    forward = (
        "def forward(self, x):\n"
        "    y = self.up(x).view(5, 2, 8)\n"
        "    return self.head(torch.einsum('vkc,kvw->wc', y, self.graph * self.edges).relu())"
    )
    model = generated_models.model(made, forward)()
    assert infer_roles(model, example=X)["edges"] == infer_roles(model)["edges"]


@pytest.mark.parametrize(
    "returned",
    [
        "torch.einsum('bk,bkv->bv', w, parts)",
        "torch.einsum('bk,bkv->bv', w, parts.log_softmax(-1)).log_softmax(-1)",
        "(w[..., None] * parts).sum(1)",
    ],
)
def test_a_gate_of_what_is_returned_stays_hidden(generated_models: ModuleType, returned: str) -> None:
    """The example shows that what it makes is returned; the source, that it weighs what else is."""
    made = "self.parts, self.gate = nn.ModuleList(nn.Linear(6, 9) for _ in range(3)), nn.Linear(6, 3)"
    forward = (
        "def forward(self, x):\n    parts = torch.stack([part(x) for part in self.parts], 1)\n"
        f"    w = self.gate(x).softmax(-1)\n    return {returned}"
    )
    model = generated_models.model(made, forward)()
    read, shown = infer_roles(model), infer_roles(model, example=X)
    assert (read["gate.weight"].role, read["gate.weight"].doubt) == (Role.MATRIX, Doubt.NONE)
    assert shown["gate.weight"] == read["gate.weight"]
