"""A rank that is gone ends a save with an error after the run's timeout, never with a wait of half an hour."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from megaopt_checkpoint.background import background_of
from megaopt_checkpoint.ranks import Ranks

from megaopt_core.errors import CheckpointError
from megaopt_core.parallel import timeout_of

pytestmark = pytest.mark.any_python


def timeouts(rank: int, size: int) -> list[float]:
    """Return the seconds that the default group and the background's wait, and those of a group of our own."""
    mine = dist.new_group([0, 1], timeout=dist.default_pg_timeout / 60)
    groups = dist.group.WORLD, background_of(Ranks()).group, mine, background_of(Ranks(mine)).group
    return [timeout_of(group).total_seconds() for group in groups]


@pytest.mark.distributed
def test_the_background_group_waits_as_long_as_the_run(launch):
    """Also over a group with a timeout of its own."""
    world, background, mine, other = launch(timeouts, 2, group_timeout=7.0)[0]
    assert (world, background) == (7.0, 7.0)
    assert mine == other != 7.0


def save_alone(rank: int, size: int) -> tuple[str, float]:
    """Let the second rank die before the background group exists; return what the first one hears, and when."""
    dist.all_reduce(torch.zeros(1))
    if rank:
        os._exit(0)
    begun = time.monotonic()
    try:
        background_of(Ranks())
    except CheckpointError as error:
        return str(error), time.monotonic() - begun
    return "no error", 0.0


@pytest.mark.distributed
def test_a_peer_that_dies_before_the_first_background_save(launch):
    """The error comes after the timeout of the run, five seconds here."""
    found = launch(save_alone, 2, group_timeout=5.0, may_die=True)
    words, seconds = next(entry for entry in found if entry)
    assert "another rank is gone" in words
    assert seconds < 150.0
