"""Process groups of several instances of the distributed optimizer: sharded inside, replicated across."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from attrs import evolve

from megaopt_core.errors import ParallelGroupError
from megaopt_core.parallel import ProcessGroupCollection, new_group, size_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["with_instances"]


def with_instances(pgs: ProcessGroupCollection, instances: int) -> ProcessGroupCollection:
    """Return process groups in which data parallelism is divided into instances of neighbouring ranks.

    Groups that the caller has made (`intra_dp_cp`, `inter_dist_opt`...) are kept. A collective over the
    data-parallel group where groups have to be made.

    Args:
        pgs: the caller's process groups.
        instances: number of instances.

    Raises:
        ParallelGroupError: the number of ranks is no multiple of the number of instances, or the model is divided
            over ranks as well and `intra_dist_opt` is not the group of one instance.
    """
    if instances == 1 or pgs.intra_dp_cp is not None:
        return pgs
    if size_of(pgs.mp) > 1 or size_of(pgs.tp_ep_pp) > 1:
        raise ParallelGroupError(
            f"num_distributed_optimizer_instances={instances} with a model that is divided over ranks: pass "
            "intra_dp_cp, inter_dist_opt and intra_dist_opt, the group of all ranks of one instance"
        )
    intra, inter = _divide(pgs.dense_dp, instances)
    if pgs.expt_dp is pgs.dense_dp:
        intra_expert, inter_expert = intra, inter
    else:
        intra_expert, inter_expert = _divide(pgs.expt_dp, instances)
    return evolve(
        pgs,
        intra_dp_cp=intra,
        inter_dist_opt=inter,
        intra_expt_dp=intra_expert,
        inter_expt_dist_opt=inter_expert,
        intra_dist_opt=intra,
    )


def _divide(group: ProcessGroup | None, instances: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    if group is None:
        return None, None
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % instances:
        raise ParallelGroupError(
            f"num_distributed_optimizer_instances={instances} does not divide the {len(ranks)} data-parallel ranks"
        )
    size, me = len(ranks) // instances, group.rank()
    first = me // size * size
    what = f"dividing {len(ranks)} data-parallel ranks into {instances} instances"
    return new_group(ranks[first : first + size], group, what), new_group(
        ranks[me % size :: size], group, what
    )
