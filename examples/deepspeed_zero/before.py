"""A training loop on DeepSpeed's ZeRO-1."""

import deepspeed
import torch
from network import batch, make_model

settings = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 1e-2,
            "warmup_num_steps": 2,
            "warmup_type": "linear",
            "total_num_steps": 20,
        },
    },
    "zero_optimization": {"stage": 1},
}
network = make_model()
model, optimizer, _, _ = deepspeed.initialize(
    model=network, model_parameters=network.parameters(), config=settings
)
rank = torch.distributed.get_rank()

for step in range(20):
    inputs, targets = batch(rank)
    loss = (model(inputs) - targets).square().mean()
    model.backward(loss)
    model.step()
    if step % 5 == 4 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.2f}")

model.save_checkpoint("deepspeed-checkpoint")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
