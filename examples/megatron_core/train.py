"""A GPT of Megatron-core's, trained by Muon: torchrun --nproc-per-node 8 train.py --tp 2 --save checkpoints."""

import argparse
from pathlib import Path

import torch
from megaopt_trainers.megatron import get_megatron_optimizer
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megaopt_core import OptimizerParamScheduler

VOCABULARY, LENGTH = 64, 16


def build(args):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(1)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).cuda()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer=args.optimizer,
        lr=2e-3,
        min_lr=2e-4,
        weight_decay=0.1,
        use_layer_wise_distributed_optimizer=args.layer_wise,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        0.0,
        settings.lr,
        settings.min_lr,
        5,
        args.steps,
        "cosine",
        0.1,
        0.1,
        args.steps,
        "constant",
    )
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, scheduler


def batches(step):
    """Sequences that count up, from another number each."""
    chance = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    first = torch.randint(VOCABULARY, (4, 1), generator=chance)
    tokens = ((first + torch.arange(LENGTH + 1)) % VOCABULARY).cuda()
    positions = torch.arange(LENGTH).expand(4, LENGTH).cuda()
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None].cuda()
    yield tokens[:, :-1], tokens[:, 1:], positions, mask


def forward_step(data, model):
    tokens, labels, positions, mask = next(data)

    def loss_of(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return model(tokens, positions, mask, labels=labels), loss_of


def sharded(model, optimizer, scheduler, is_loading=False):
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group}
    found = {"model": model.module.sharded_state_dict(metadata=metadata)}
    found["optimizer"] = optimizer.sharded_state_dict(found, is_loading=is_loading, metadata=metadata)
    return {**found, "scheduler": scheduler.state_dict()}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--until", type=int, help="stop at this step of the schedule")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--layer-wise", action="store_true")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args(arguments)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    model_parallel_cuda_manual_seed(1)
    model, optimizer, scheduler = build(args)
    if args.load:
        loaded = dist_checkpointing.load(
            sharded(model, optimizer, scheduler, is_loading=True), str(args.load)
        )
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])

    run, losses = get_forward_backward_func(), []
    for step in range(scheduler.num_steps, args.until or args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = run(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=[model],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=4,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if updated:
            scheduler.step(increment=1)
        losses += [float(each["loss"]) for each in found]
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(sharded(model, optimizer, scheduler), str(args.save))
    if losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(optimizer.report(after_step=True))
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end")
    return losses


if __name__ == "__main__":
    main()
