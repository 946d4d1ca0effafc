"""Megatron-core on a CPU: shims for its calls of CUDA, its parallel state over gloo, and small models of its own."""

import contextlib
import logging
import warnings
from typing import Any

import torch

__all__ = ["batch", "gpt", "start", "transformer_config"]

VOCABULARY, LENGTH = 64, 16


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


def _without_cuda() -> None:
    """Set aside the calls of Megatron's that need CUDA."""
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


def start(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Initialise Megatron's parallel state over the ranks that there are."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    _without_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    with contextlib.suppress(Exception):  # there is no CUDA generator to seed
        random.model_parallel_cuda_manual_seed(1)
    random.get_cuda_rng_tracker().fork = lambda *args, **kwargs: contextlib.nullcontext()


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


def gpt(config: Any, *, tied: bool = True, first: bool = True, last: bool = True, seed: int = 5) -> Any:
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
    ).to(config.params_dtype)


def batch(step: int, dp_rank: int = 0, sequences: int = 2) -> tuple[torch.Tensor, ...]:
    """Return tokens, positions and a mask; other ones at each step and data-parallel rank."""
    chance = torch.Generator().manual_seed(100 + step * 7 + dp_rank)
    tokens = torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=chance)
    positions = torch.arange(LENGTH).expand(sequences, LENGTH)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return tokens, positions, mask
