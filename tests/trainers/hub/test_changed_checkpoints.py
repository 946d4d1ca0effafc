"""Runs of trainers that began with torch's AdamW are resumed from their checkpoints with ours."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megaopt_trainers.midrun import change_checkpoint, take_over
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}


def trainer(model: nn.Module, folder: Path, kind: str | None) -> Trainer:
    """Return a Trainer of six steps, with its own AdamW or with ours."""
    rows = [{"input_ids": torch.arange(start, start + 16) % 128} for start in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, save_steps=3, per_device_train_batch_size=8, learning_rate=1e-2,
        weight_decay=0.1, max_grad_norm=0.0, lr_scheduler_type="linear", report_to="none", disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if kind is not None:
        more["optimizer_cls_and_kwargs"] = (lambda: build_optimizer, {"optimizer": kind, **SETTINGS})
    return Trainer(
        model, arguments, train_dataset=[{**row, "labels": row["input_ids"]} for row in rows], **more
    )


@pytest.fixture
def began(tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    """Train with the Trainer's AdamW; return its third step's checkpoint, and the parameters in the end."""
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES))
    trainer(model, tmp_path, None).train()
    return tmp_path / "checkpoint-3", [param.detach().clone() for param in model.parameters()]


def changed(checkpoint: Path, kind: str) -> tuple[Trainer, Any]:
    """Change the checkpoint, as the page shows it, and resume from it."""
    target = checkpoint.parent / f"{kind}-3"
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    old = trainer(model, checkpoint.parent, None).create_optimizer()
    told = change_checkpoint(checkpoint, target, build_optimizer(model, kind, **SETTINGS), old)
    resumed = trainer(model, checkpoint.parent, kind)
    resumed.train(resume_from_checkpoint=str(target))
    return resumed, told


def test_the_trainer_goes_on_with_adam_to_the_bit(began) -> None:
    """And with its linear schedule."""
    checkpoint, expected = began
    resumed, told = changed(checkpoint, "adam")
    assert told.anew == ()
    assert all(map(torch.equal, resumed.model.parameters(), expected))


def test_the_trainer_goes_on_with_muon(began) -> None:
    """Matrices begin anew, at the learning rate where the schedule is."""
    checkpoint, _ = began
    resumed, told = changed(checkpoint, "muon")
    assert len(told.anew) == 7
    saved = torch.load(checkpoint.parent / "muon-3" / "optimizer.pt", weights_only=True)
    assert {(group["initial_lr"], group["lr"]) for group in saved["param_groups"]} == {(1e-2, 5e-3)}
    assert {group["lr"] for group in resumed.optimizer.param_groups} == {0.0}
    steps = {int(state["step"]) for state in resumed.optimizer.state.values() if "step" in state}
    assert steps == {6}


def test_a_checkpoint_that_cannot_be_changed_is_refused(began, tmp_path: Path) -> None:
    """A folder without one, and a target that is there."""
    checkpoint, _ = began
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    old, new = trainer(model, tmp_path, None).create_optimizer(), build_optimizer(model, "adam", **SETTINGS)
    with pytest.raises(ConfigurationError, match=r"optimizer\.pt and .*scheduler\.pt missing"):
        change_checkpoint(tmp_path, tmp_path / "new", new, old)
    with pytest.raises(ConfigurationError, match="is there already"):
        change_checkpoint(checkpoint, checkpoint, new, old)


class Module(pl.LightningModule):
    """Regression."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
        self.kind = kind

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, or ours."""
        if self.kind is None:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return build_optimizer(self, self.kind, **SETTINGS)


def fit(module: Module, folder: Path, epochs: int, resume: Path | None = None) -> list[torch.Tensor]:
    """Train, save, and return the parameters."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    lightning = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    lightning.fit(module, DataLoader(data, batch_size=4), ckpt_path=resume)
    if resume is None:
        lightning.save_checkpoint(folder / "old.ckpt")
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_lightning_goes_on(tmp_path: Path, kind) -> None:
    """As the page shows it: the optimizer's state in the file is changed."""
    fit(Module(None), tmp_path, 2)
    expected = fit(Module(None), tmp_path, 4, tmp_path / "old.ckpt")
    checkpoint = torch.load(tmp_path / "old.ckpt", weights_only=False)
    module, before = Module(kind), Module(None)
    module.load_state_dict(checkpoint["state_dict"])
    old = torch.optim.AdamW(module.parameters())
    old.load_state_dict(checkpoint["optimizer_states"][0])
    new = module.configure_optimizers()
    told = take_over(new, old)
    checkpoint["optimizer_states"] = [new.state_dict()]
    torch.save(checkpoint, tmp_path / "new.ckpt")
    actual = fit(Module(kind), tmp_path, 4, tmp_path / "new.ckpt")
    assert not any(map(torch.equal, actual, before.parameters()))
    if kind == "adam":
        assert told.anew == ()
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    else:
        assert told.anew == ("net.0.weight", "net.2.weight")
