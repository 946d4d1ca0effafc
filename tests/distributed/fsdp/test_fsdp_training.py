"""Models that `fully_shard` has cut train as they do whole, in one process."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import (
    alone,
    build,
    cut_model,
    installed,
    mesh_of,
    replicas_of,
    require_close,
    train,
    whole_model,
)

pytest.importorskip("megaopt_fsdp")
pytestmark = pytest.mark.distributed


def equal_runs(rank: int, size: int, kinds: list[str], dims: dict[str, int]) -> None:
    """Train whole models here, cut ones with the others, and compare."""
    mesh = mesh_of(**dims)
    for kind in kinds:
        reference = whole_model()
        expected = train(reference, build(reference, kind, alone()), range(10), replicas=replicas_of(mesh)[0])
        model = cut_model(mesh)
        optimizer = build(model, kind, mesh)
        norms = train(model, optimizer, range(10), mesh)
        assert max(expected) > 0.5, kind  # clipped
        assert norms == pytest.approx(expected, rel=1e-6), kind
        require_close(model, reference)
        assert {row.strategy for row in optimizer.report().params} == {"fsdp"}, kind


@pytest.mark.parametrize("dims", [{"dp": 2}], ids="x".join)
def test_a_cut_model_trains_as_the_whole_one(launch, dims) -> None:
    """Parameters and norms are those of one process over ten steps, clipping included."""
    launch(equal_runs, math.prod(dims.values()), installed(), dims)
