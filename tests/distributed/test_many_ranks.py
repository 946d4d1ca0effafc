"""Layouts for tens and hundreds of ranks, without the ranks: torch's fake process group and tensors without memory."""

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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from megaopt_distributed.wrapped import wrapped_buffers
from megaopt_core import OptimizerConfig, route
from megaopt_core.sharding import World
from megaopt_core.routing._sharding import strategy_layouts

RANKS = int(sys.argv[1])
LAYERS = max(2, 12 * RANKS // 512)


def model():
    layers = (nn.TransformerEncoderLayer(1024, 16, 4096) for _ in range(LAYERS))
    return nn.Sequential(nn.Embedding(50257, 1024), *layers)


begun = time.monotonic()
with torch.device("meta"):
    bare = model()
routing = route(OptimizerConfig(optimizer="adam", lr=1e-3, sharding="distributed"), bare)
dist.init_process_group("fake", rank=37, world_size=RANKS, store=FakeStore())
with FakeTensorMode():
    module = model()
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=40_000 * RANKS
    )
    model = DistributedDataParallel(module, config)
    (layout,) = strategy_layouts(routing, model.process_groups, wrapped_buffers([model], None)).values()
    model.start_param_sync()
    model.finish_grad_sync()
    shards = {bucket.shard_range(bucket.grad_data.numel()) for bucket in model.buckets}

owned = dict.fromkeys(routing.params, 0)
per_rank = []
for rank in range(RANKS):
    elements = 0
    for piece in layout.pieces({"dp": rank}):
        for _, shard in piece.members:
            owned[shard.name] += shard.numel
            elements += shard.numel
    per_rank.append(elements)
assert owned == {name: entry.spec.numel for name, entry in routing.params.items()}
(buffer,) = layout.buffers({}).values()
assert all((high - low) % (RANKS * 8) == 0 for low, high in buffer.buckets)
assert max(per_rank) <= buffer.numel // RANKS
print(len(buffer.buckets), "buckets", round(time.monotonic() - begun, 1), "seconds")
"""


@pytest.mark.parametrize("ranks", sometimes([64, 512], [64]))
def test_many_ranks_share_every_element_out_in_seconds(tmp_path: Path, ranks: int) -> None:
    """200 M parameters in buckets over 512 ranks, or fewer: every element has one owner, every cut is aligned."""
    done = run_python(["-c", CODE, str(ranks)], cwd=tmp_path, env=QUIET, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "buckets"
