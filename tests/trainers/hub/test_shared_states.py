"""Trainers under DistributedDataParallel, with states that ranks share: they train, save in one file, and go on."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from megaopt_trainers import transformers as for_transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from megaopt_core import build_optimizer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

SHARED = [("adam", "distributed"), ("muon", "layer_wise")]
STEPS = 4


class Network(nn.Module):
    """Regression, with the outputs that the Trainer reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


class Module(pl.LightningModule):
    """The same for Lightning."""

    def __init__(self, kind: str, sharding: str) -> None:
        super().__init__()
        self.network, self.kind, self.sharding = Network(), kind, sharding

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return self.network(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Share the states out."""
        return build_optimizer(self, self.kind, lr=1e-2, sharding=self.sharding)


def rows() -> list[dict[str, torch.Tensor]]:
    """Return data that depends on the seed alone."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return [{"inputs": row, "labels": row[:1] * row[1:2]} for row in inputs]


def as_torchrun(rank: int, size: int) -> None:
    """Set what torchrun sets."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters."""
    return [param.detach().clone() for param in model.parameters()]


def with_the_trainer(
    rank: int, size: int, kind: str, sharding: str, folder: str, steps: int, resume: bool
) -> list[torch.Tensor]:
    """Train as the page of the Trainer shows it."""
    as_torchrun(rank, size)
    model = Network()
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=2, per_device_train_batch_size=4, max_grad_norm=0.0,
        lr_scheduler_type="constant", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows(),
        callbacks=[for_transformers.WholeStates()],
        optimizer_cls_and_kwargs=(
            lambda: build_optimizer,
            {"optimizer": kind, "lr": 1e-2, "sharding": sharding, "clip_grad": 1.0},
        ),
    )
    trainer.train(resume_from_checkpoint=resume)
    return values(model)


def with_lightning(
    rank: int, size: int, kind: str, sharding: str, folder: str, steps: int, resume: bool
) -> list[torch.Tensor]:
    """Train as the page of Lightning shows it."""
    as_torchrun(rank, size)
    data = [
        (row["inputs"], row["labels"]) for row in rows()[: size * 8]
    ]  # two batches an epoch, at whose end it saves
    inputs, labels = (torch.stack(each) for each in zip(*data, strict=True))
    model = Module(kind, sharding)
    saves = pl.callbacks.ModelCheckpoint(
        folder, every_n_epochs=1, save_last=True, save_on_train_epoch_end=True
    )
    trainer = pl.Trainer(
        max_epochs=steps // 2, accelerator="cpu", devices=size, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saves],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)
    trainer.fit(model, loader, ckpt_path=f"{folder}/last.ckpt" if resume else None)
    return values(model)


@pytest.mark.parametrize("run", [with_the_trainer, with_lightning])
@pytest.mark.parametrize(("kind", "sharding"), SHARED)
def test_it_saves_one_file_and_goes_on_bit_for_bit(launch, tmp_path: Path, run, kind, sharding) -> None:
    """Equal to copies on every rank, and to a run without a break."""
    expected = launch(run, 2, kind, "replicated", str(tmp_path / "copies"), STEPS, False)
    whole = launch(run, 2, kind, sharding, str(tmp_path / "whole"), STEPS, False)
    launch(run, 2, kind, sharding, str(tmp_path / "parts"), STEPS // 2, False)
    rest = launch(run, 2, kind, sharding, str(tmp_path / "parts"), STEPS, True)
    for mine, theirs, resumed in zip(whole, expected, rest, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, mine, resumed))


def with_accelerate(
    rank: int, size: int, kind: str, sharding: str, placement: list[bool] | None
) -> list[torch.Tensor]:
    """Train a loop of accelerate's."""
    as_torchrun(rank, size)
    accelerator = Accelerator(cpu=True)
    model = Network()
    optimizer = build_optimizer(model, kind, lr=1e-2, sharding=sharding)
    prepared, stepper = accelerator.prepare(model, optimizer, device_placement=placement)
    data = rows()
    for step in range(STEPS):
        row = data[step * size + rank]
        accelerator.backward(prepared(**row)["loss"])
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
    return values(model)


@pytest.mark.parametrize("placement", [None, [True, False]])
@pytest.mark.parametrize(("kind", "sharding"), SHARED)
def test_accelerate_prepares_both_in_one_call(launch, kind, sharding, placement) -> None:
    """The optimizer is built from the bare model on its device; values are those of copies."""
    expected = launch(with_accelerate, 2, kind, "replicated", None)
    actual = launch(with_accelerate, 2, kind, sharding, placement)
    for mine, theirs in zip(actual, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))
