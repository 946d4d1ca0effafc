"""A training loop in Megatron's manner, on its own optimizer."""

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from network import batch, make_model

torch.distributed.init_process_group()
parallel_state.initialize_model_parallel()
rank = torch.distributed.get_rank()

ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
transformer = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
model = DistributedDataParallel(transformer, ddp_config, make_model())

config = OptimizerConfig(
    optimizer="adam",
    lr=2e-2,
    min_lr=2e-3,
    weight_decay=0.1,
    clip_grad=1.0,
    use_distributed_optimizer=True,
)
optimizer = get_megatron_optimizer(
    config, [model], no_weight_decay_cond=lambda name, param: param.dim() == 1 or name.startswith("0.")
)
scheduler = OptimizerParamScheduler(
    optimizer,
    init_lr=0.0,
    max_lr=2e-2,
    min_lr=2e-3,
    lr_warmup_steps=32,
    lr_decay_steps=320,
    lr_decay_style="cosine",
    start_wd=0.1,
    end_wd=0.1,
    wd_incr_steps=320,
    wd_incr_style="constant",
)

for step in range(20):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    inputs, targets = batch(rank)
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    finalize_model_grads([model])
    successful, grad_norm, zeros = optimizer.step()
    scheduler.step(increment=16)
    if step % 5 == 4 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.2f}, gradient norm {grad_norm:.2f}")

state = {"optimizer": optimizer.sharded_state_dict(model.state_dict())}
dist_checkpointing.save(state, "megatron-checkpoint")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
