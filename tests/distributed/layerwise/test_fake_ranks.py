"""A model of tens or hundreds of ranks is planned, wrapped, and stepped on one of them: torch's fake process group."""

import os
from pathlib import Path

import pytest
from long_runs import sometimes
from warm import run_python

pytestmark = pytest.mark.any_python

QUIET = {**os.environ, "PYTHONWARNINGS": "ignore"}
CODE = """
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaopt_core import OptimizerConfig, get_megatron_optimizer, route
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig, plan_full_param_layout

RANKS = int(sys.argv[1])
LAYERS = RANKS * 300 // 512
dist.init_process_group("fake", rank=37, world_size=RANKS, store=FakeStore())
model = nn.Sequential(nn.Embedding(64, 16), *(nn.TransformerEncoderLayer(16, 2, 64) for _ in range(LAYERS)))
settings = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=200 * RANKS
)
config = OptimizerConfig(optimizer="muon", lr=1e-2, sharding="layer_wise")

begun = time.process_time()
layout = plan_full_param_layout(model, settings, routing=route(config, [model]))
wrapped = DistributedDataParallel(model, settings, full_param_layout=layout)
optimizer = get_megatron_optimizer(config, [wrapped])
seconds = time.process_time() - begun

((key, buffer),) = [each for each in layout.buffers.items() if each[0].is_managed_by_layer_wise]
assert len(buffer.bucket_ends) > 5
owner = {}
for name, (start, stop) in buffer.param_ranges.items():
    bucket = buffer.bucket_of[name]
    shares = [buffer.share(bucket, rank, RANKS) for rank in range(RANKS)]
    (owner[name],) = [rank for rank, (low, high) in enumerate(shares) if low <= start and stop <= high]
held = [list(owner.values()).count(rank) for rank in range(RANKS)]
assert len(owner) == 4 * LAYERS, len(owner)
assert 1 <= min(held) <= max(held) <= 6, (min(held), max(held))
pieces = [piece for child in optimizer.chained_optimizers for part in child.parts for piece in part.pieces]
stepped = {shard.name for piece in pieces for _, shard in piece.spec.members if shard.is_whole}
assert {name for name, rank in owner.items() if rank == 37} == stepped & set(owner)
assert seconds < 60

before = {name: param.detach().clone() for name, param in model.named_parameters()}
begun = time.process_time()
for _ in range(2):
    hidden = model[0](torch.arange(8).view(2, 4))
    for layer in list(model)[1:]:
        hidden = layer(hidden)
    hidden.square().mean().backward()
    assert optimizer.step()[0]
    optimizer.zero_grad()
stepping = time.process_time() - begun
changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
assert stepped & set(owner) <= changed, (stepped, changed)
assert not changed & (set(owner) - stepped), changed & (set(owner) - stepped)
print(round(seconds, 1), round(stepping, 1), "seconds")
assert stepping < 60
"""


@pytest.mark.parametrize("ranks", sometimes([64, 512], [64]))
def test_an_optimizer_for_many_ranks_is_built_and_stepped_in_seconds(tmp_path: Path, ranks: int) -> None:
    """Two matrices and more a rank, in buckets: each lies in one share, all ranks have some, and one steps its own."""
    done = run_python(["-c", CODE, str(ranks)], cwd=tmp_path, env=QUIET, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "seconds"
