"""A model over tens or hundreds of ranks is built and stepped on one of them: torch's fake process group."""

import os
from pathlib import Path

import pytest
from long_runs import sometimes
from warm import run_python

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
pytestmark = pytest.mark.any_python

QUIET = {**os.environ, "PYTHONWARNINGS": "ignore"}
CODE = """
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaopt_core import MatrixView, build_optimizer
from megaopt_core.sharding import World
from megaopt_fsdp.layout import FsdpLayout, traffic

begun = time.process_time()
experts = int(sys.argv[1])
ranks = 8 * experts
dist.init_process_group("fake", rank=37, world_size=ranks, store=FakeStore())
mesh = init_device_mesh("cpu", (8, experts), mesh_dim_names=("dp", "ep"))
everywhere = mesh["dp", "ep"]._flatten("all")
model = nn.Module()
for index in range(ranks + 88):
    param = nn.Parameter(DTensor.from_local(torch.randn(1, 48), everywhere, [Shard(0)], run_check=False))
    param.matrix_view, param.grad = MatrixView(), torch.ones_like(param)
    model.register_parameter(f"dense{index}", param)
for index in range(20):
    local = torch.randn(2, 3, 16)
    param = nn.Parameter(DTensor.from_local(local, mesh, [Shard(1), Shard(0)], run_check=False))
    param.matrix_view, param.grad = MatrixView(batch_dims=1), torch.ones_like(param)
    model.register_parameter(f"experts{index}", param)
optimizer = build_optimizer(model, "muon", lr=1e-2, pg_collection=mesh)
optimizer.step()
seconds = time.process_time() - begun

layouts = {}
for part in optimizer.parts:
    is_expert = part.pieces[0].spec.members[0][1].name.startswith("experts")
    groups = {piece.spec.group for piece in part.pieces}
    specs = [entry.spec for entry in optimizer.routing.params.values() if entry.spec.is_expert is is_expert]
    layout = FsdpLayout(specs, World({"dp": ranks, "ep": experts, "expert_dp": 8}))
    sent = part.sharded.sent()
    assert sent.bytes == traffic(layout, groups, is_expert=is_expert)[37], (is_expert, sent)
    assert sent.collectives == 2 * len(layout.buckets(groups, is_expert=is_expert))
    owners = [each.owner for each in layout.owned(is_expert=is_expert)]
    assert len(set(owners)) == ranks if not is_expert else max(map(owners.count, owners)) <= 3
assert seconds < 60, seconds
print("both kinds", round(seconds, 1), "seconds")
"""


@pytest.mark.parametrize("experts", sometimes([8, 64], [8]))
def test_an_optimizer_over_many_ranks_sends_what_is_planned(tmp_path: Path, experts: int) -> None:
    """Dense matrices over all of them, experts over both dimensions: bytes and collectives of a step, in seconds."""
    done = run_python(["-c", CODE, str(experts)], cwd=tmp_path, env=QUIET, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("both kinds")
