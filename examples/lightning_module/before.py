"""Train a small network with Lightning and AdamW."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.3f}")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("loss", outputs["loss"])


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(256, 16)
data = DataLoader(TensorDataset(inputs, inputs[:, :4].prod(1, keepdim=True)), batch_size=32, shuffle=True)
model = Regression()
trainer = lightning.Trainer(
    max_epochs=5,
    accelerator="auto",
    devices=1,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, data)
trainer.save_checkpoint("lightning.ckpt")
