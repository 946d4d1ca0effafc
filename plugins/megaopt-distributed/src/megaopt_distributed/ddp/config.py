"""The settings of data parallelism."""

from __future__ import annotations

from typing import Any

from attrs import asdict, field, fields, frozen
from attrs.validators import optional

from megaopt_core.config import one_of, whole_number
from megaopt_core.errors import ConfigurationError, UnknownSettingError, UnsupportedSettingError

__all__ = ["DistributedDataParallelConfig"]

_WITHOUT_MEANING = {
    "fp8_param_gather": "parameters are kept in the dtype of the model",
    "reuse_grad_buf_for_mxfp8_param_ag": "mxfp8 parameters are not supported",
    "gradient_reduce_div_fusion": "gradients are scaled as a bucket, in one kernel",
    "data_parallel_sharding_strategy": "use PyTorch's fully_shard for sharded parameters",
    "use_custom_fsdp": "use PyTorch's fully_shard for sharded parameters",
    "use_megatron_fsdp": "use PyTorch's fully_shard for sharded parameters",
    "delay_wgrad_compute": "weight gradients come from autograd",
    "nccl_ub": "buffers are ordinary tensors",
    "fsdp_double_buffer": "use PyTorch's fully_shard for sharded parameters",
    "outer_dp_sharding_strategy": "use PyTorch's fully_shard for sharded parameters",
    "disable_symmetric_registration": "buffers are ordinary tensors",
    "keep_fp8_transpose_cache": "fp8 parameters are not supported",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "fp8 parameters are not supported",
    "preserve_fp32_weights": "main parameters are the optimizer's business",
    "reduce_scatter_with_fp32_accumulation": "use grad_reduce_in_fp32",
}
"""Fields that Megatron-style trainers have and that mean nothing here, with what to do instead."""


def _switch() -> Any:
    return field(default=False, validator=one_of((True, False)))


@frozen(kw_only=True, init=False)
class DistributedDataParallelConfig:
    """How `DistributedDataParallel` keeps and reduces gradients.

    Fields of Megatron-style configurations that have no meaning here are accepted with an empty value (None, False,
    "no_shard") and rejected with any other.

    Args:
        grad_reduce_in_fp32: keep and reduce the gradients of bf16 and fp16 parameters in fp32.
        overlap_grad_reduce: reduce a bucket as soon as its last gradient is ready, while the backward pass goes on.
        overlap_param_gather: gather updated parameters while the forward pass runs; every module waits for its own.
        align_param_gather: gather all buckets before the first forward pass of a chunk goes on, so that pipeline stages
            keep step.
        use_distributed_optimizer: keep parameters in buffers too and reduce-scatter gradients, for the sharding
            strategy `distributed`.
        num_distributed_optimizer_instances: shard the optimizer inside this many equal parts of the data-parallel group
            and replicate it across them.
        check_for_nan_in_grad: raise, naming parameter and rank, when a gradient is not finite before it is reduced.
        check_for_large_grads: raise for gradients too whose sum over all ranks could overflow: their magnitude times
            the number of ranks is beyond the range of the dtype they are reduced in.
        bucket_size: elements of a bucket; None: `max(40_000_000, 1_000_000 * dp)`. Without overlap there is one bucket.
        pad_buckets_for_high_nccl_busbw: pad bucket ends to a multiple of 2**16 elements.
        average_in_collective: let the collective divide instead of scaling gradients before it.

    Raises:
        ConfigurationError: a value is not allowed, or settings contradict each other.
        UnknownSettingError: no such field.
        UnsupportedSettingError: a field that has no meaning here has a value.

    Example:
        >>> DistributedDataParallelConfig(overlap_grad_reduce=True).bucket_size is None
        True
        >>> DistributedDataParallelConfig(nccl_ub=True)
        Traceback (most recent call last):
        ...
        megaopt_core.errors.UnsupportedSettingError: nccl_ub=True has no meaning here: buffers are ordinary tensors
    """

    grad_reduce_in_fp32: bool = _switch()
    overlap_grad_reduce: bool = _switch()
    overlap_param_gather: bool = _switch()
    align_param_gather: bool = _switch()
    use_distributed_optimizer: bool = _switch()
    num_distributed_optimizer_instances: int = field(default=1, validator=whole_number(1))
    check_for_nan_in_grad: bool = _switch()
    check_for_large_grads: bool = _switch()
    bucket_size: int | None = field(default=None, validator=optional(whole_number(1)))
    pad_buckets_for_high_nccl_busbw: bool = _switch()
    average_in_collective: bool = _switch()

    def __init__(self, **settings: Any) -> None:
        known = [attribute.name for attribute in fields(type(self))]
        for name, value in list(settings.items()):
            if name in known:
                continue
            if name not in _WITHOUT_MEANING:
                raise UnknownSettingError(
                    f"DistributedDataParallelConfig has no setting {name!r}; it has {', '.join(known)}",
                    setting=name,
                    value=value,
                )
            if value not in (None, False, "no_shard"):
                raise UnsupportedSettingError(
                    f"{name}={value!r} has no meaning here: {_WITHOUT_MEANING[name]}",
                    setting=name,
                    value=value,
                )
            del settings[name]
        self.__attrs_init__(**settings)

    def __attrs_post_init__(self) -> None:
        needs = {
            "overlap_param_gather": self.overlap_param_gather,
            "num_distributed_optimizer_instances > 1": self.num_distributed_optimizer_instances > 1,
        }
        for name, asked in needs.items():
            if asked and not self.use_distributed_optimizer:
                raise ConfigurationError(
                    f"{name} needs use_distributed_optimizer=True", setting=name.split(" ")[0]
                )
        if self.align_param_gather and not self.overlap_param_gather:
            raise ConfigurationError(
                "align_param_gather needs overlap_param_gather=True", setting="align_param_gather"
            )

    @property
    def checks_gradients(self) -> bool:
        """True when gradients are checked before they are reduced."""
        return self.check_for_nan_in_grad or self.check_for_large_grads

    def to_dict(self) -> dict[str, Any]:
        """Return all settings."""
        return asdict(self)
