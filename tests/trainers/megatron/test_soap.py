"""SOAP under Megatron's training loop equals Megatron's own where both take the same matrices and none is noise."""

from typing import Any

import megatron_harness as harness
import pytest
import torch

pytestmark = pytest.mark.distributed

SETTINGS = {
    "optimizer": "soap",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "adam_beta2": 0.95,
}
SCHEDULE = (0.0, 1e-3, 1e-4, 3, 20, "cosine", 0.1, 0.1, 20, "constant")


def _is_matrix(param: torch.nn.Parameter) -> bool:
    return param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


def _built(is_ours: bool) -> tuple[Any, Any, Any]:
    from megaopt_trainers.megatron import get_megatron_optimizer
    from megatron.core import optimizer as megatron
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from megaopt_core import MatrixView

    chunk = harness.wrapped(harness.transformer_config(), positions="rope")
    for name, param in chunk.named_parameters():
        if is_ours and name.endswith("linear_qkv.weight"):
            param.matrix_view = MatrixView()  # Megatron's SOAP takes q, k and v together
    config = megatron.OptimizerConfig(**SETTINGS)
    # A direction without a gradient has a second moment of rounding errors: far below this eps, no step is made of it.
    matrices = megatron.ParamKey(predicate=megatron.ParamPredicate("matrices", _is_matrix))
    overrides = megatron.get_standard_config_overrides(config) | {matrices: {"eps": 1e-3}}
    build = get_megatron_optimizer if is_ours else megatron.get_megatron_optimizer
    optimizer = build(config, [chunk], config_overrides=overrides)
    return chunk, optimizer, OptimizerParamScheduler(optimizer, *SCHEDULE)


def _losses(rank: int, size: int) -> tuple[list[float], list[float], list[str]]:
    harness.start()
    harness.accept_cpu_types()
    found = []
    for is_ours in (False, True):
        chunk, optimizer, scheduler = _built(is_ours)
        found.append(harness.losses_of(chunk, optimizer, range(20), scheduler, microbatches=8))
    of_soap = [row.name for row in optimizer.report().params if row.optimizer == "soap"]
    return found[0], found[1], of_soap


def test_soap(launch) -> None:
    """With tokens enough for every matrix, q/k/v in one, and an eps above rounding: to a millionth."""
    ((theirs, ours, names),) = launch(_losses, 1)
    assert len(names) == 8
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-6)
