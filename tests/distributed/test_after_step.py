"""Transforms after a step write main values, remainders and model together, on one rank and over several."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megaopt_core import Granularity, build_optimizer, hookimpl
from megaopt_core.errors import PluginError, ShardingError
from megaopt_core.plugin_api import NamedPiece

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

STORED = {
    "fp32": {},
    "main parameters": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
    "main parameters in fp16": {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "main_params_dtype": torch.float16,
    },
}


class ScaleRows:
    """Scales row i of every matrix by 1 - i / 100."""

    granularity = Granularity.ELEMENT

    def __call__(self, pieces: Sequence[NamedPiece]) -> None:
        """Scale."""
        for piece in pieces:
            if len(piece.shard.shape) == 2:
                piece.scale_rows(1.0 - torch.arange(piece.shard.shape[0]) / 100)


class ClipSpectralNorm:
    """Keeps the spectral norm of every matrix at 0.1 or below."""

    granularity = Granularity.TENSOR

    def __call__(self, pieces: Sequence[NamedPiece]) -> None:
        """Clip."""
        for piece in pieces:
            if len(piece.shard.shape) == 2:
                norm = torch.linalg.matrix_norm(piece.value, 2)
                piece.scale_((0.1 / norm).clamp(max=1.0))


class Plugin:
    """Offers a transform."""

    megaopt_api = "1"

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @hookimpl
    def megaopt_after_step(self, optimizer: Any) -> list[Any]:
        """Offer it."""
        return [self.transform]


def network(dtype: torch.dtype) -> nn.Sequential:
    """A model whose matrices have other numbers of rows and columns; of what FSDP2 cuts, Adam steps multiples of 8."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 7)).to(
        dtype
    )


def trained(
    name: str,
    transform: Any,
    stored: str,
    steps: int = 3,
    wrap: Callable[..., Any] | None = None,
    **built: Any,
) -> tuple[nn.Module, Any]:
    """Train with gradients that are the same on all ranks."""
    settings = STORED[stored]
    model = network(torch.bfloat16 if settings else torch.float32)
    model = model if wrap is None else wrap(model)
    with temporary_plugin(Plugin(transform), "transforming"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = build_optimizer(model, name, lr=0.01, clip_grad=0.0, **settings, **built)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                param.grad = cut_as(param, grad)
            optimizer.step()
    return model, optimizer


def cut_as(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is cut over ranks as its parameter is."""
    if not isinstance(param, DTensor):
        return grad
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(grad, param.device_mesh, param.placements)


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return all values whole."""
    found = [param.detach() for param in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found]


@pytest.mark.parametrize("stored", STORED)
def test_rows_are_scaled_in_main_value_and_model(stored: str) -> None:
    """As a loop does that steps torch's Adam in fp32 and scales its values; the model holds them rounded."""
    model, optimizer = trained("adam", ScaleRows(), stored, steps=4, weight_decay=0.0)
    dtype = next(model.parameters()).dtype
    reference = network(dtype).float()
    adam = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in reference.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(dtype).float()
        adam.step()
        with torch.no_grad():
            for param in reference.parameters():
                if param.dim() == 2:
                    param.mul_((1.0 - torch.arange(len(param)) / 100)[:, None])
    coarse = stored == "main parameters in fp16"
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        main = optimizer.state[param].get("main_param", param).detach().float()
        assert torch.allclose(main, expected, rtol=2e-3 if coarse else 1e-5, atol=1e-4 if coarse else 1e-6)
        assert torch.equal(main.to(dtype), param.detach())


def sharded(rank: int, size: int, stored: str, sharding: str) -> list[torch.Tensor]:
    """Values after training over ranks."""
    wrap = None
    if sharding == "fsdp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

        def wrap(model: nn.Module) -> Any:
            return fully_shard(model, mesh=mesh)

    model, _ = trained("adam", ScaleRows(), stored, wrap=wrap, sharding=sharding)
    return values(model)


@pytest.mark.parametrize("sharding", ["replicated", "distributed", "layer_wise", "fsdp"])
def test_elements_are_written_alike_under_every_strategy(launch, sharding: str) -> None:
    """To the bit of one rank, also where a rank has a part of a row."""
    for stored in STORED:
        alone = values(trained("adam", ScaleRows(), stored)[0])
        for of_rank in launch(sharded, 2, stored, sharding):
            assert all(map(torch.equal, of_rank, alone)), stored


def clipped(rank: int, size: int, sharding: str) -> list[float]:
    """Spectral norms after training over ranks."""
    model, _ = trained("muon", ClipSpectralNorm(), "main parameters", sharding=sharding)
    return [torch.linalg.matrix_norm(value.float(), 2).item() for value in values(model) if value.dim() == 2]


@pytest.mark.parametrize("sharding", ["replicated", "layer_wise"])
def test_whole_matrices_are_clipped(launch, sharding: str) -> None:
    """Those that Muon steps; alike on all ranks."""
    first, second = launch(clipped, 2, sharding)
    assert first == second
    assert max(first[:2]) <= 0.101


def refused(rank: int, size: int, sharding: str) -> str:
    """The error of the build."""
    with pytest.raises(ShardingError) as caught:
        trained("adam", ClipSpectralNorm(), "fp32", sharding=sharding)
    return str(caught.value)


def test_a_transform_of_whole_matrices_is_refused_where_they_are_cut(launch) -> None:
    """On all ranks, at the build."""
    for words in launch(refused, 2, "distributed"):
        assert "a transform of plugin 'transforming'" in words or "cannot route" in words
        assert "needs whole matrices" in words


def test_a_transform_that_fails_names_its_plugin() -> None:
    """The step has been taken by then."""

    class Failing(ScaleRows):
        def __call__(self, pieces: Sequence[NamedPiece]) -> None:
            raise KeyError("lost")

    with pytest.raises(
        PluginError, match=r"transform Failing of plugin 'transforming'.* failed: KeyError: 'lost'"
    ):
        trained("adam", Failing(), "fp32", steps=1)


def test_factors_of_another_number_are_refused() -> None:
    """They would be of other rows."""

    class Odd(ScaleRows):
        def __call__(self, pieces: Sequence[NamedPiece]) -> None:
            pieces[0].scale_rows(torch.ones(3))

    with pytest.raises(PluginError, match=r"has shape \(16, 24\), got factors of shape \(3,\)"):
        trained("adam", Odd(), "fp32", steps=1)


@pytest.mark.parametrize("given", [[3], [lambda pieces: None]])
def test_anything_else_than_transforms_is_refused(given: list[Any]) -> None:
    """What has no granularity, too."""
    with pytest.raises(PluginError, match="it must be callable and have granularity"):
        trained("adam", given[0], "fp32")


def test_a_skipped_step_is_not_transformed() -> None:
    """Nothing has changed then."""
    model, optimizer = trained("adam", ScaleRows(), "main parameters", steps=1)
    before = values(model)
    with temporary_plugin(Plugin(ScaleRows()), "transforming"):
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.inf)
        assert not optimizer.step().update_successful
    assert all(map(torch.equal, before, values(model)))


def test_the_report_names_transforms() -> None:
    """With their plugin."""
    _, optimizer = trained("adam", ScaleRows(), "fp32", steps=1)
    assert "after a step: transform ScaleRows of plugin 'transforming'" in str(optimizer.report())
