"""The settings of data parallelism are checked when they are given."""

import pytest
from megaopt_distributed import DistributedDataParallelConfig

from megaopt_core.errors import ConfigurationError, UnknownSettingError, UnsupportedSettingError


def test_defaults_reduce_after_backward_in_the_dtype_of_the_parameters() -> None:
    """Nothing overlaps, nothing is sharded unless it is asked for."""
    settings = DistributedDataParallelConfig().to_dict()
    assert settings == {
        "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "align_param_gather": False,
        "use_distributed_optimizer": False,
        "num_distributed_optimizer_instances": 1,
        "check_for_nan_in_grad": False,
        "check_for_large_grads": False,
        "bucket_size": None,
        "pad_buckets_for_high_nccl_busbw": False,
        "average_in_collective": False,
    }


@pytest.mark.parametrize("name", ["fp8_param_gather", "nccl_ub", "use_megatron_fsdp"])
def test_fields_without_a_meaning_here_are_refused(name: str) -> None:
    """The empty value is accepted, so that a saved configuration loads; another says what to do."""
    DistributedDataParallelConfig(**{name: False})
    with pytest.raises(UnsupportedSettingError, match=f"{name}=True has no meaning here") as caught:
        DistributedDataParallelConfig(**{name: True})
    assert caught.value.setting == name


def test_a_name_that_nobody_knows_is_refused() -> None:
    """A spelling mistake is no silent default."""
    with pytest.raises(UnknownSettingError, match="'overlap_grads'"):
        DistributedDataParallelConfig(overlap_grads=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap_param_gather": True}, "overlap_param_gather needs use_distributed_optimizer=True"),
        ({"num_distributed_optimizer_instances": 2}, "needs use_distributed_optimizer=True"),
        ({"align_param_gather": True}, "align_param_gather needs overlap_param_gather=True"),
        ({"bucket_size": 0}, "bucket_size=0"),
        ({"num_distributed_optimizer_instances": 0}, "num_distributed_optimizer_instances=0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict, message: str) -> None:
    """An overlap without anything to overlap is a mistake."""
    with pytest.raises(ConfigurationError, match=message):
        DistributedDataParallelConfig(**settings)


@pytest.mark.parametrize(
    "name", [name for name, value in DistributedDataParallelConfig().to_dict().items() if value is False]
)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_true_or_false(name: str, value: object) -> None:
    """`"no"` is a true value in Python; nobody means it so."""
    with pytest.raises(ConfigurationError) as caught:
        DistributedDataParallelConfig(**{name: value})
    assert str(caught.value) == f"{name}={value!r}: must be one of True, False"
