"""Models that `fully_shard` has cut train as they do whole, in one process."""

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from long_runs import sometimes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import (
    ThirdParty,
    alone,
    build,
    by_columns,
    cut_model,
    installed,
    mesh_of,
    replicas_of,
    require_close,
    train,
    train_with_gradients_of,
    whole_model,
)

pytest.importorskip("megaopt_fsdp")
from megaopt_testing import temporary_plugin

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

MESHES = {
    "fsdp": ({"dp": 2}, {}),
    "columns": ({"dp": 2}, {"shard_placement_fn": by_columns}),
    "kept whole after forward": ({"dp": 2}, {"reshard_after_forward": False}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "fsdp x tp": ({"dp": 2, "tp": 2}, {}),
    "more ranks than rows": ({"dp": 4}, {}),
}
WHOLE = ("soap", "newcomer", "as_one")
FEW = [kind for kind in ("adam", "muon", "as_one") if kind in installed()]
"""One of each granularity: what wider meshes are tried with in every run of the tests."""


def equal_runs(rank: int, size: int, kinds: list[str], dims: dict[str, int], options: dict) -> None:
    """Train whole models here, cut ones with the others, and compare."""
    mesh = mesh_of(**dims)
    for kind in kinds:
        with temporary_plugin(ThirdParty(), name="third-party"):
            equal_run(kind, mesh, options)


def expected_warning(kind: str) -> AbstractContextManager[Any]:
    """Return what catches the warning that one rank steps all of a group, where it must come."""
    if kind != "as_one":
        return nullcontext()
    return pytest.warns(UserWarning, match="'as_one' steps all of a group at once")


def equal_run(kind: str, mesh: DeviceMesh, options: dict) -> None:
    """Train with one optimizer, and look at the report."""
    reference, model = whole_model(), cut_model(mesh, **options)
    # The bases of SOAP make much of how a gradient is rounded: both get the same, which no clipping rounds again.
    settings = {"clip_grad": 0.0} if kind == "soap" else {}
    theirs = build(reference, kind, alone(), **settings)
    with expected_warning(kind):
        optimizer = build(model, kind, mesh, **settings)
    # Tensor parallelism adds gradients up in another order: of one near zero Adam and Muon make much as well.
    if kind == "soap" or "tp" in mesh.mesh_dim_names:
        norms, expected = train_with_gradients_of(model, optimizer, reference, theirs, range(10), mesh)
    else:
        norms = train(model, optimizer, range(10), mesh)
        expected = train(reference, theirs, range(10), replicas=replicas_of(mesh)[0])
    if kind != "soap":
        assert max(expected) > 0.5, kind  # clipped
        assert norms == pytest.approx(expected, rel=1e-6), kind
    require_close(model, reference)
    rows = optimizer.report().params
    assert {row.strategy for row in rows} == {"fsdp"}, kind
    travels = "whole" if kind in WHOLE else "split"
    assert {row.travels for row in rows} - {""} == ({travels} if kind not in ("adam", "lion") else set()), (
        kind
    )


@pytest.mark.parametrize("name", sometimes(MESHES, ("columns", "fsdp x tp")))
def test_a_cut_model_trains_as_the_whole_one(launch, name) -> None:
    """Parameters and norms are those of one process over ten steps, clipping included; no step gathers a tensor."""
    dims, options = MESHES[name]
    ranks = math.prod(dims.values())
    launch(equal_runs, ranks, installed() if ranks == 2 else FEW, dims, options)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (dims, _) in MESHES.items() if math.prod(dims.values()) > 2])
def test_every_optimizer_trains_so_over_four_ranks(launch, name) -> None:
    """Those that few ranks have shown, too."""
    dims, options = MESHES[name]
    launch(
        equal_runs, math.prod(dims.values()), [kind for kind in installed() if kind not in FEW], dims, options
    )


def written(rank: int, size: int) -> None:
    """Halve the weights between steps, counted by torch and behind its back, of which owners step whole matrices."""
    mesh = mesh_of(dp=size)
    with temporary_plugin(ThirdParty(), name="third-party"):
        cut, reference = cut_model(mesh), whole_model()
        optimizer, other = build(cut, "newcomer", mesh), build(reference, "newcomer", alone())
        for step, behind in enumerate((False, True)):
            train_with_gradients_of(cut, optimizer, reference, other, range(step, step + 1), mesh)
            for param in (*cut.parameters(), *reference.parameters()):
                local = param._local_tensor if isinstance(param, DTensor) else param.detach()
                (local.data if behind else local).mul_(0.5)
        train_with_gradients_of(cut, optimizer, reference, other, range(2, 4), mesh)
        require_close(cut, reference)


def test_owners_take_over_what_is_written(launch) -> None:
    """Weights that somebody loads or clips between two steps reach the ranks that step them whole."""
    launch(written, 2)
