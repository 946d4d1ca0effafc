"""Lightning's manual optimization and its hook of clipping: values are those of torch's AdamW."""

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from megaopt_core import build_optimizer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

STEPS_OF_AN_EPOCH = 4


def optimizer_of(module: nn.Module, is_ours: bool, **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW, ours or torch's; `overrides={}`: it decays biases too, as torch's does."""
    if is_ours:
        return build_optimizer(module, "adam", lr=1e-2, weight_decay=0.1, overrides={}, **settings)
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


class Module(pl.LightningModule):
    """A small network; subclasses train it in their own way."""

    strategy = "ddp"

    def __init__(self, is_ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU())
        self.second = nn.Linear(16, 1)
        self.is_ours = is_ours

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.mse_loss(self.second(self.first(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        """Return one optimizer that a scheduler of torch's drives in every step."""
        optimizer = optimizer_of(self, self.is_ours, clip_grad=0.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Accumulating(Module):
    """Two batches for a step, which is clipped, taken and scheduled by hand."""

    def __init__(self, is_ours: bool) -> None:
        super().__init__(is_ours)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        """Go through one batch."""
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class InTurn(Module):
    """Two optimizers that take turns, as those of a GAN do; one steps with a closure."""

    strategy = "ddp_find_unused_parameters_true"  # half of it is frozen while the other half is stepped

    def __init__(self, is_ours: bool) -> None:
        super().__init__(is_ours)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        """Return one for each half."""
        return [optimizer_of(half, self.is_ours, clip_grad=0.0) for half in (self.first, self.second)]

    def training_step(self, batch: Any) -> None:
        """Step one half, then the other."""
        first, second = self.optimizers()

        def closure() -> torch.Tensor:
            loss = self.loss(batch)
            second.zero_grad()
            self.manual_backward(loss)
            return loss

        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            second.step(closure)


class Automatic(Module):
    """Lightning steps, and calls the hook of clipping."""

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return self.loss(batch)


class ClippingValues(Automatic):
    """The hook clips elements."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip."""
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class ClippingAPart(Automatic):
    """The hook clips the norm of one layer's gradients by torch's function."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip."""
        nn.utils.clip_grad_norm_(self.second.parameters(), 0.05)


class ClippingInside(Automatic):
    """Lightning clips torch's; ours does so within its step, over all ranks."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip torch's."""
        if not self.is_ours:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        """Return it with its own clipping."""
        return optimizer_of(self, self.is_ours, clip_grad=0.1)


WAYS = [Accumulating, InTurn, ClippingValues, ClippingAPart, ClippingInside]


def trained(way: type[Module], is_ours: bool, size: int, folder: str) -> list[torch.Tensor]:
    """Train three epochs, and return the parameters."""
    inputs = torch.randn(4 * STEPS_OF_AN_EPOCH * size, 8, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", devices=size, strategy=way.strategy if size > 1 else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder,
    )  # fmt: skip
    module = way(is_ours)
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    trainer.fit(module, DataLoader(data, batch_size=4))
    return [param.detach().clone() for param in module.parameters()]


def both(rank: int, size: int, way: type[Module], folder: str) -> tuple[list[torch.Tensor], ...]:
    """Train with torch's AdamW and with ours."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    before = [param.detach().clone() for param in way(True).parameters()]
    return trained(way, False, size, folder), trained(way, True, size, folder), before


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_torch(launch, tmp_path: Path, way, size) -> None:
    """To a millionth, on one rank and on two under ddp, on each of which every parameter has moved."""
    for theirs, ours, before in launch(both, size, way, str(tmp_path)):
        assert all(not torch.equal(start, value) for start, value in zip(before, ours, strict=True))
        for expected, actual in zip(theirs, ours, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
