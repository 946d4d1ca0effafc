"""A peer that died while ranks met for a build: our error on the others, within the group's timeout."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes
from megaopt_distributed.ddp.instances import with_instances
from torch.distributed.device_mesh import init_device_mesh

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import CommunicationError
from megaopt_core.parallel import new_group, timeout_of
from megaopt_core.sharding._attached import make_peer_groups
from megaopt_core.sharding._layout import World
from megaopt_core.sharding._stage_specs import specs_of_stage

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def stage_specs(pgs: ProcessGroupCollection) -> None:
    """Tell the others what this rank has."""
    specs_of_stage([], pgs, {}, World({"dp": 2}))


def peer_groups(pgs: ProcessGroupCollection) -> None:
    """Ask the others for their peers."""
    make_peer_groups([], {}, pgs)


def made_group(pgs: ProcessGroupCollection) -> None:
    """Make a group with the other."""
    new_group([0, 1], dist.group.WORLD, "making a group of peers")


def instances(pgs: ProcessGroupCollection) -> None:
    """Divide data parallelism into instances of the distributed optimizer."""
    with_instances(pgs, 2)


MEETINGS = {function.__name__: function for function in (stage_specs, peer_groups, made_group, instances)}


def one_dies(rank: int, size: int, meeting: str) -> tuple[str, float]:
    """Let rank 1 die before a meeting; return what rank 0 hears, and after how long."""
    dist.all_reduce(torch.zeros(1))
    pgs = ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    if rank == 1:
        os._exit(0)
    begun = time.monotonic()
    try:
        MEETINGS[meeting](pgs)
    except CommunicationError as error:
        return str(error), time.monotonic() - begun
    return "no error", 0.0


@pytest.mark.parametrize("meeting", sometimes(MEETINGS, ["stage_specs", "instances"]))
def test_the_others_hear_of_it_in_time(launch, meeting):
    """The error says what was under way and what to do."""
    (words, seconds), _ = launch(one_dies, 2, meeting, group_timeout=5.0, may_die=True)
    assert "another rank has stopped, or the process group's timeout is over" in words
    assert "Restart all ranks from the last checkpoint" in words
    assert seconds < 150.0


def joined_dimensions(rank: int, size: int) -> list[float]:
    """Return how long the groups wait that dimensions of a mesh are joined into."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    pgs = ProcessGroupCollection.from_device_mesh(mesh)
    return [timeout_of(group).total_seconds() for group in (pgs.dp_cp, pgs.expt_dp, pgs.intra_dist_opt)]


def test_groups_of_a_mesh_that_are_joined_have_the_timeout_of_the_run(launch):
    """Torch makes them without a word about it: they would wait for half an hour."""
    assert launch(joined_dimensions, 4, group_timeout=9.0) == [[9.0] * 3] * 4
