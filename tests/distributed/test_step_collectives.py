"""How often ranks send each other anything in one step: a new collective is a decision, not an accident.

Each count is of one rank's second step with given gradients, where nothing has changed between two steps: what the
first step compares once, and what a write or a load costs, is not in it.
"""

import functools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "irecv",
    "isend",
    "reduce",
    "reduce_scatter_tensor",
)

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 2.0},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
}


def layers(precision: str) -> nn.Sequential:
    """Return a model with two matrices that are marked as such, and vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    for layer in (model[0], model[2]):
        layer.weight.matrix_view = MatrixView()
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    return model.to(dtype)


def counted(step: Any) -> Counter[str]:
    """Return how often each collective is called by a step, those that others call left out."""
    calls: Counter[str] = Counter()
    depth = 0

    def noted(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            calls[name] += depth == 0
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            call = noted(name, getattr(dist, name))
            patch.setattr(dist, name, call)
            patch.setattr(dist.distributed_c10d, name, call)  # `P2POp` takes only what its own module names
        step()
    return +calls


def sent(rank: int, size: int, optimizer: str, sharding: str, tp: int) -> dict[str, list[dict[str, int]]]:
    """Return what this rank's second step sends in every precision: without clipping, then with it."""
    found: dict[str, list[dict[str, int]]] = {}
    for precision, settings in PRECISIONS.items():
        if (optimizer, precision) == ("muon", "fp16"):
            continue  # not supported
        for clip in (0.0, 1.0):
            mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
            model = layers(precision)
            if tp > 1:
                model[0].weight.tensor_model_parallel, model[0].weight.partition_dim = True, 0
            if sharding == "fsdp":
                model = fully_shard(model, mesh=mesh["dp"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                given = None if sharding == "fsdp" else mesh
                made = build_optimizer(
                    model,
                    optimizer,
                    lr=0.1,
                    sharding=sharding,
                    clip_grad=clip,
                    pg_collection=given,
                    **settings,
                )
                for _ in range(2):
                    for param in model.parameters():
                        param.grad = torch.ones_like(param)
                    counts = counted(made.step)
            found.setdefault(precision, []).append(dict(counts))
    return found


PAIR = {"irecv": 1, "isend": 1}
MATRIX = {"all_to_all_single": 2}

# Of each rank: all-reduces by precision, without and with clipping. Over the ranks together: what parameters cost.
EXPECTED: dict[tuple[str, str, int, int], tuple[dict[str, tuple[int, int]], list[dict[str, int]]]] = {
    ("adam", "replicated", 2, 1): ({"fp32": (1, 1), "bf16": (1, 1), "fp16": (1, 1)}, [{}] * 2),
    ("adam", "replicated", 2, 2): ({"fp32": (1, 1), "bf16": (1, 1), "fp16": (1, 1)}, [{}] * 2),
    ("adam", "replicated", 4, 2): ({"fp32": (2, 2), "bf16": (2, 2), "fp16": (2, 2)}, [{}] * 4),
    ("adam", "distributed", 2, 1): ({"fp32": (1, 2), "bf16": (1, 2), "fp16": (1, 2)}, [PAIR] * 2),
    ("adam", "distributed", 4, 2): ({"fp32": (2, 2), "bf16": (2, 2), "fp16": (2, 2)}, [PAIR] * 4),
    ("adam", "layer_wise", 2, 1): ({"fp32": (1, 2), "bf16": (1, 2), "fp16": (1, 2)}, [PAIR] * 2),
    ("adam", "layer_wise", 4, 2): ({"fp32": (2, 2), "bf16": (2, 2), "fp16": (2, 2)}, [PAIR] * 4),
    ("adam", "fsdp", 2, 1): ({"fp32": (1, 2), "bf16": (1, 2), "fp16": (1, 2)}, [{}] * 2),
    ("muon", "replicated", 2, 1): ({"fp32": (1, 1), "bf16": (1, 1)}, [{}] * 2),
    ("muon", "replicated", 2, 2): ({"fp32": (1, 1), "bf16": (1, 1)}, [{}] * 2),
    ("muon", "replicated", 4, 2): ({"fp32": (2, 2), "bf16": (2, 2)}, [{}] * 4),
    ("muon", "layer_wise", 2, 1): ({"fp32": (1, 2), "bf16": (1, 2)}, [{"irecv": 2, "isend": 2}] * 2),
    # The two ranks that own the cut matrix bring it together and back.
    ("muon", "layer_wise", 4, 2): (
        {"fp32": (2, 2), "bf16": (2, 2)},
        [*[{"irecv": 2, "isend": 2}] * 2, *[{"irecv": 2, "isend": 2, **MATRIX}] * 2],
    ),
    ("muon", "fsdp", 2, 1): ({"fp32": (1, 2), "bf16": (1, 2)}, [MATRIX] * 2),
}


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: " ".join(map(str, case)))
def test_a_step_has_no_collective_that_is_not_written_down(launch, case: tuple[str, str, int, int]) -> None:
    """Fewer are as much of a change as more: the table says what a step costs."""
    optimizer, sharding, size, tp = case
    sums, exchanged = EXPECTED[case]
    sums = {**sums, "remainders": sums["bf16"]}
    expected = [
        {
            precision: [{**exchange, **({"all_reduce": count} if count else {})} for count in sums[precision]]
            for precision in sums
        }
        for exchange in exchanged
    ]
    assert launch(sent, size, optimizer, sharding, tp) == expected
