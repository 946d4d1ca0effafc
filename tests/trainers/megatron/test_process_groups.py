"""Process groups come from Megatron where nobody passes them."""

import megatron_harness as harness
import pytest
import torch.distributed as dist

from megaopt_core import build_optimizer, route

pytestmark = pytest.mark.distributed


def _tensor_parallel(rank: int, size: int, tp: int) -> tuple:
    harness.start(tp=tp)
    model = harness.gpt(harness.transformer_config())
    optimizer = build_optimizer(model, "adam", lr=1e-3)
    tokens, positions, mask = harness.batch(0, rank // tp)
    model(tokens, positions, mask, labels=tokens).mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=_data_parallel())
    taken = optimizer.step().update_successful
    axes = optimizer.routing.axes
    return taken, axes["tp"], axes["dp"], dict(route(optimizer.config, model).axes) == dict(axes)


def _data_parallel() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


@pytest.mark.parametrize(("size", "tp"), [(2, 2), (4, 2)])
def test_tensor_parallel_ranks_are_no_replicas(launch, size, tp) -> None:
    """A build without `pg_collection` reads Megatron's parallel state, and the step is taken."""
    assert launch(_tensor_parallel, size, tp) == [(True, tp, size // tp, True)] * size


def _of_another(rank: int, size: int) -> int:
    import torch

    harness.start(tp=2)
    model = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    return build_optimizer(model, "adam", lr=1e-3).routing.axes["dp"]


def test_a_model_that_is_not_megatrons_keeps_the_default_group(launch) -> None:
    """Megatron's state says nothing about models of others."""
    assert launch(_of_another, 2) == [2, 2]
