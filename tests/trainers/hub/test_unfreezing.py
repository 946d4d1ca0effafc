"""Runs of Lightning's that unfreeze a backbone, by its callback or by a flag, save it and go on to the bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from megaopt_core import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")

UNFREEZES = 1


class Module(pl.LightningModule):
    """A backbone with a norm, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
        self.kind = kind

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Step what trains."""
        return build_optimizer(self, self.kind, lr=1e-2, weight_decay=0.1, clip_grad=1.0)


class Callback(BackboneFinetuning):
    """Lightning's, which unfreezes at one epoch alone: at a resume behind it, it is told to."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze, also where a run was resumed."""
        super().finetune_function(pl_module, epoch, optimizer)
        if epoch > self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)


class Flag(pl.Callback):
    """Freezes at the start, and unfreezes by a flag."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Freeze."""
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Unfreeze."""
        pl_module.backbone.requires_grad_(trainer.current_epoch >= UNFREEZES)


def run(kind: str, way: type, folder: Path, epochs: int, *, resume: bool) -> list[torch.Tensor]:
    """Train some epochs, and return the parameters."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    saves = pl.callbacks.ModelCheckpoint(
        folder, every_n_epochs=1, save_last=True, save_on_train_epoch_end=True
    )
    unfreezing = Callback(UNFREEZES, backbone_initial_lr=1e-3) if way is Callback else way()
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saves, unfreezing],
    )  # fmt: skip
    model = Module(kind)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2]), batch_size=4)
    trainer.fit(model, loader, ckpt_path=folder / "last.ckpt" if resume else None)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("until", [1, 2, 3])
@pytest.mark.parametrize("way", [Callback, Flag])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_run_that_unfreezes_is_resumed_to_the_bit(tmp_path, kind, way, until) -> None:
    """Saved before or after it unfreezes; learning rates of Lightning's callback act on all of what it added."""
    expected = run(kind, way, tmp_path / "whole", 5, resume=False)
    run(kind, way, tmp_path / "parts", until, resume=False)
    resumed = run(kind, way, tmp_path / "parts", 5, resume=True)
    assert all(map(torch.equal, resumed, expected))
    untouched = Module(kind)
    assert not torch.equal(expected[0], untouched.backbone[0].weight)
