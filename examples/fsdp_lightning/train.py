"""Train with Lightning's ModelParallelStrategy: the module is cut by FSDP2 in configure_model, and Muon steps it."""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from megaopt_core import build_optimizer


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = build_optimizer(
            self.net,
            "muon",
            lr=1e-2,
            weight_decay=0.1,
            muon_extra_scale_factor=0.2,
            pg_collection=self.device_mesh,
        )
        if self.global_rank == 0:
            print(optimizer.report())
        return optimizer

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.3f}")


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(256, 16)
data = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=32)
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="auto",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), data)
trainer.strategy.barrier()
