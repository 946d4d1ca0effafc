"""How much memory a step adds on a rank: the bytes of tensors that are alive at the worst moment.

Tensors are counted, not what the allocator holds: gloo's threads let go of what they have sent whenever they come to
it. So a stand-in for the exchange sends copies that nobody counts.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import ThirdParty, build, mesh_of

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_fsdp.routes import Route
from megaopt_testing import temporary_plugin
from torch.distributed.fsdp import fully_shard

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]
SIDE, LAYERS = 128, 17
MATRIX = 4 * SIDE * SIDE
SMALL = MATRIX // 10
"""Bytes for norms, counters and what else has no size of a matrix."""


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that were made since it was entered and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.before: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and look at what there is now."""
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        self.known = {at: ref for at, ref in self.known.items() if not ref[0].expired()}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.known:
                self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.known.values()))
        return made


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if type(each) in (torch.Tensor, nn.Parameter)]


class Sent:
    """A work that has ended, and brings what has arrived when it is waited for."""

    def __init__(self, received: torch.Tensor, arrived: torch.Tensor) -> None:
        self.bring = partial(received.copy_, arrived)

    def wait(self) -> None:
        """Bring it."""
        with _disable_current_modes():
            self.bring()
        del self.bring


@contextmanager
def copies_travel() -> Iterator[None]:
    """Let process groups have copies of what is exchanged, which nobody counts."""
    exchange = dist.all_to_all_single

    def send(received: torch.Tensor, sent: torch.Tensor, *sizes: Any, group: Any, async_op: bool) -> Sent:
        assert async_op
        with _disable_current_modes():
            arrived = torch.empty_like(received)
            exchange(arrived, sent.clone(), *sizes, group=group)
        return Sent(received, arrived)

    with mock.patch.object(dist, "all_to_all_single", send):
        yield


def peak_of(work: Callable[[], Any]) -> int:
    """Return how many bytes more are alive at the worst moment than before."""
    with copies_travel(), Alive() as alive:
        work()
    return alive.peak


def cut_layers(mesh: DeviceMesh) -> nn.Module:
    """Return a stack of square matrices, each cut by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bytes_of(routes: Iterable[Route], rank: int) -> int:
    """Return what one bucket holds on a rank: the parts that it sends, and the matrices that it gets."""
    sent = sum(route.numel for route in routes if route.sends)
    return 4 * (sent + sum(math.prod(route.box[1]) for route in routes if route.owner == rank))


def added(rank: int, size: int, kind: str) -> dict[str, int]:
    """Step twice with buckets of two matrices for each owner; return what the second added, and what to hold it to."""
    from megaopt_fsdp import owners

    owners.BUCKET_BYTES = 2 * MATRIX
    mesh = mesh_of(dp=size)
    model = cut_layers(mesh)
    with temporary_plugin(ThirdParty(), name="third-party"):
        optimizer = build(model, kind, mesh)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, SIDE)).square().sum().backward()
        peak = peak_of(optimizer.step)
    told = {"peak": peak, "grads": 0}
    for part in optimizer.parts:
        if part.split is not None:
            exchange = part.split.exchange
            buckets = [bucket.routes for bucket in exchange.travelling]
            infos = [exchange.owned[0]] * 2
            updates = [torch.randn(SIDE, SIDE) for _ in infos]
            told["work"] = peak_of(partial(part.split.split.transform, updates, infos))
        elif hasattr(part.sharded, "buckets"):
            buckets = [bucket.routes for bucket in part.sharded.buckets]
            told["grads"] = 4 * sum(piece.param.numel() for piece in part.pieces)
            told["work"] = MATRIX
    told["buckets"] = len(buckets)
    told["bucket"] = max(bytes_of(routes, rank) for routes in buckets)
    return told


@pytest.mark.parametrize("kind", ["muon", "newcomer"])
def test_a_step_adds_two_buckets(launch, kind) -> None:
    """Beside what transforming two matrices takes, and, in a whole step, the gradients of what the rank owns."""
    for told in launch(added, 2, kind):
        assert told["buckets"] >= 4, told
        assert told["bucket"] == 4 * MATRIX, told
        assert told["peak"] <= 2 * told["bucket"] + told["work"] + told["grads"] + SMALL, told
