"""A training loop in Megatron's manner, on megaopt's Muon."""

import torch
from megaopt_checkpoint import save_checkpoint
from megaopt_distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    plan_full_param_layout,
)
from network import batch, make_model

from megaopt_core import (
    OptimizerConfig,
    OptimizerParamScheduler,
    ParamKey,
    ProcessGroupCollection,
    get_megatron_optimizer,
    get_standard_config_overrides,
    route,
)

torch.distributed.init_process_group()
groups = ProcessGroupCollection(dp=torch.distributed.group.WORLD)
rank = torch.distributed.get_rank()

ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
config = OptimizerConfig(
    optimizer="muon",
    lr=2e-2,
    min_lr=2e-3,
    weight_decay=0.1,
    clip_grad=1.0,
    sharding="layer_wise",
    muon_extra_scale_factor=0.2,
)
overrides = {**get_standard_config_overrides(config), ParamKey(name="0.*"): {"wd_mult": 0.0}}

network = make_model()
routing = route(config, [network], overrides, groups)
layout = plan_full_param_layout(network, ddp_config, groups, routing=routing)
model = DistributedDataParallel(network, ddp_config, groups, full_param_layout=layout)
optimizer = get_megatron_optimizer(config, [model], overrides, pg_collection=groups)
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
    optimizer.zero_grad()
    inputs, targets = batch(rank)
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    successful, grad_norm, zeros = optimizer.step()
    scheduler.step(increment=16)
    if step % 5 == 4 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.2f}, gradient norm {grad_norm:.2f}")

save_checkpoint("megaopt-checkpoint", model, optimizer, scheduler)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
