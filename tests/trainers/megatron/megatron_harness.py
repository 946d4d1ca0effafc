"""Megatron-core on a CPU: shims for its calls of CUDA, its parallel state over gloo, and small models of its own."""

import contextlib
import logging
import multiprocessing
import warnings
from typing import Any

import torch

__all__ = [
    "MOE",
    "accept_cpu_types",
    "batch",
    "gpt",
    "hybrid",
    "losses_of",
    "start",
    "transformer_config",
    "without_cuda",
    "wrapped",
]

VOCABULARY, LENGTH = 64, 16

MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.0,
    "add_bias_linear": False,
}
"""Settings of a mixture of experts."""


class _Stream:
    """Takes every call and does nothing, as streams and events do where there is one queue."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def without_cuda() -> None:
    """Set aside the calls of Megatron's that need CUDA, and let its checkpoints be written by children of a rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    multiprocessing.current_process()._config["daemon"] = False
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize"):
        setattr(cuda, name, lambda *args: None)
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        setattr(cuda, name, lambda *args, **kwargs: _Stream())
    cuda.stream = lambda *args: contextlib.nullcontext()
    for name in ("FloatTensor", "IntTensor", "LongTensor", "ByteTensor", "DoubleTensor"):
        setattr(cuda, name, getattr(torch, name))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed = lambda *args, **kwargs: None
    random.get_cuda_rng_tracker().fork = lambda *args, **kwargs: contextlib.nullcontext()


def start(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Initialise Megatron's parallel state over the ranks that there are."""
    without_cuda()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
        )


def transformer_config(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return the configuration of a small transformer, with fused kernels off."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
    return TransformerConfig(**given | settings)


def gpt(
    config: Any,
    *,
    tied: bool = True,
    first: bool = True,
    last: bool = True,
    seed: int = 5,
    positions: str = "learned_absolute",
) -> Any:
    """Return a GPTModel: all of it, or one pipeline stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(seed)
    experts = config.num_moe_experts
    spec = get_gpt_layer_local_spec(num_experts=experts) if experts else get_gpt_layer_local_spec()
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
    ).to(config.params_dtype)


def hybrid(config: Any, *, seed: int = 5) -> Any:
    """Return a HybridModel of attention and MLP or expert layers, of Megatron's layers without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    torch.manual_seed(seed)
    experts = config.num_moe_experts
    layer = get_gpt_layer_local_spec(num_experts=experts).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
    layers = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=mlp),
    )
    hybrid_block.TENorm = WrappedTorchNorm
    return HybridModel(
        config,
        ModuleSpec(module=hybrid_block.HybridStack, submodules=layers),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        hybrid_layer_pattern="*E*E" if experts else "*-*-",
        position_embedding_type="rope",
    )


def batch(step: int, dp_rank: int = 0, sequences: int = 2) -> tuple[torch.Tensor, ...]:
    """Return tokens, positions and a mask; other ones at each step and data-parallel rank."""
    chance = torch.Generator().manual_seed(100 + step * 7 + dp_rank)
    tokens = torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=chance)
    positions = torch.arange(LENGTH).expand(sequences, LENGTH)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return tokens, positions, mask


def accept_cpu_types() -> None:
    """Let Megatron's own optimizers, for comparison, take tensors of a CPU: they compare names of CUDA's types."""
    name_of = torch.Tensor.type

    def of_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return name_of(self, *args, **kwargs)
        return name_of(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = of_cuda


def wrapped(
    config: Any,
    *,
    model: Any = None,
    tied: bool = True,
    seed: int = 5,
    positions: str = "learned_absolute",
    **ddp_settings: Any,
) -> Any:
    """Return this rank's part of a model in Megatron's `DistributedDataParallel`; None: of a GPTModel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = model or gpt(config, tied=tied, first=first, last=last, seed=seed, positions=positions)
    if config.bf16 or config.fp16:
        model = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**ddp_settings), model)


def _forward_step(batches: Any, model: Any) -> Any:
    tokens, positions, mask = batch(*next(batches))

    def loss_of(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place

    return model(tokens, positions, mask, labels=tokens), loss_of


def _batches(step: int, microbatches: int, *, global_batch: bool) -> list[tuple[int, int]]:
    """Return step and place of each batch; `global_batch`: four a step, whatever the number of ranks."""
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if global_batch:
        return [(step, place) for place in range(rank, 4, ranks)]
    return [(step * microbatches + micro, rank) for micro in range(microbatches)]


def losses_of(
    model: Any,
    optimizer: Any,
    steps: range,
    scheduler: Any = None,
    microbatches: int = 1,
    *,
    global_batch: bool = False,
) -> list[float]:
    """Train as Megatron's `train_step` does, and return the loss of each step, the same on every rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    config = get_model_config(model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if model.ddp_config.overlap_grad_reduce:
        config.no_sync_func = model.no_sync
    run, losses = get_forward_backward_func(), []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = _batches(step, microbatches, global_batch=global_batch)
        found = run(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if scheduler is not None and updated:
            scheduler.step(increment=1)
        mean = torch.zeros(1) + sum(float(each["loss"]) for each in found) / len(batches)
        if not parallel_state.is_pipeline_last_stage():
            mean.zero_()
        dist.all_reduce(mean)
        copies = (
            parallel_state.get_tensor_model_parallel_world_size()
            * parallel_state.get_data_parallel_world_size()
        )
        losses.append(mean.item() / copies)
    return losses
