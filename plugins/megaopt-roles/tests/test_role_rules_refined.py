"""An output that a network behind it refines is no residual stream, or at least it may not be."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import nn

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles

WIDTH, BANDS = 64, 20


class Speech(nn.Module):
    """Frames of a spectrum, and what a network of convolutions adds to them."""

    def __init__(self, sizes: Sequence[int], *, norm: bool, embedded: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.pitch = nn.Embedding(9, embedded)  # its width may be that of the output, by chance
        self.join = nn.Linear(WIDTH + embedded, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True) for _ in range(2)
        )
        self.spectrum = nn.Linear(WIDTH, BANDS)
        layers: list[nn.Module] = []
        for taken, made in zip([BANDS, *sizes], [*sizes, BANDS], strict=True):
            layers += [
                nn.Conv1d(taken, made, 5, padding=2),
                *([nn.BatchNorm1d(made)] if norm else []),
                nn.Tanh(),
            ]
        self.refine = nn.Sequential(*layers[:-1])

    def forward(self, ids: torch.Tensor, pitch: torch.Tensor) -> torch.Tensor:
        """Return the refined spectrum."""
        h = self.join(torch.cat([self.embed(ids), self.pitch(pitch)], -1))
        for layer in self.layers:
            h = layer(h)
        spectrum = self.spectrum(h).transpose(1, 2)
        return spectrum + self.refine(spectrum)


class Backbone(nn.Module):
    """A stream that a projection makes narrower, and two blocks that add to it: what it returns is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features."""
        h = self.second(torch.relu(self.first(x)))
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            h = h + down(torch.relu(up(norm(h))))
        return h


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("embedded", [3, BANDS])
@pytest.mark.parametrize("sizes", [(), (48,), (48, 48)])
def test_what_makes_or_refines_an_output_is_never_certain(
    sizes: Sequence[int], embedded: int, *, norm: bool
) -> None:
    """It is an output, or doubtful; what lies inside of the refinement is hidden."""
    model = Speech(sizes, norm=norm, embedded=embedded)
    found = infer_roles(model)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    for name in ("spectrum", convolutions[-1]):
        decision = found[f"{name}.weight"]
        assert decision.role is Role.OUTPUT or decision.uncertain, name
    for name in ("join", *convolutions[:-1]):
        assert (found[f"{name}.weight"].role, found[f"{name}.weight"].uncertain) == (Role.MATRIX, False), name


def test_blocks_that_add_to_a_narrower_stream_stay_certain() -> None:
    """Several of them are a stream."""
    found = infer_roles(Backbone())
    doubtful = {name for name, decision in found.items() if decision.uncertain}
    assert doubtful == set()
    assert {name for name, decision in found.items() if decision.role is Role.OUTPUT} == set()


_QUANTIZERS = {
    "a table": (
        "self.codes = nn.Embedding(30, 10)",
        "ids = torch.cdist(z, self.codes.weight).argmin(-1)\n    q = self.codes(ids)",
    ),
    "a table by hand": (
        "self.codes = nn.Parameter(torch.randn(30, 10))",
        "ids = (z @ self.codes.T).argmax(-1)\n    q = self.codes[ids]",
    ),
    "a function": (
        "self.codes = nn.Embedding(30, 10)",
        "ids = torch.cdist(z, self.codes.weight).argmin(-1)\n    q = F.embedding(ids, self.codes.weight)",
    ),
}


@pytest.mark.parametrize("case", _QUANTIZERS)
def test_a_table_refines_nothing(generated_models: ModuleType, case: str) -> None:
    """What is made of an input, and compared with codes in a loss that is returned, is hidden for certain."""
    made, quantize = _QUANTIZERS[case]
    layers = "self.first, self.before, self.after = nn.Linear(9, 24), nn.Linear(24, 10), nn.Linear(10, 24)"
    text = (
        f"def forward(self, x):\n    z = self.before(self.first(x).relu())\n    {quantize}\n"
        "    loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())\n"
        "    y = self.last(self.after(z + (q - z).detach()).relu())\n"
        "    return {'loss': F.mse_loss(y, x) + loss, 'y': y}"
    )
    model = generated_models.model(f"{made}\n{layers}\nself.last = nn.Linear(24, 9)", text)
    found = infer_roles(model())["before.weight"]
    assert (found.role, found.doubt) == (Role.MATRIX, Doubt.NONE), found.reason
