"""State of owned matrices goes to any world; a rank that dies stops the others in time."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "plugins/megaopt-checkpoint/tests"))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_layerwise import LayerWiseDistributedOptimizer
from tensor_parallel import build, cut, step_with
from training import gathered, same

from megaopt_core.errors import CommunicationError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

BF16 = torch.bfloat16


def made(
    optimizer: str, sharding: str, tp: int, size: int, dtype: torch.dtype, **settings: Any
) -> tuple[nn.Module, MegatronOptimizer, int]:
    """Build; with "ping_pong", narrow what steps everything to owners by size."""
    if sharding != "ping_pong":
        return build(optimizer, sharding, tp, size, dtype, **settings)
    model, stepper, place = build(optimizer, "replicated", tp, size, dtype, **settings)
    children = list(stepper.chained_optimizers)
    return model, LayerWiseDistributedOptimizer(children, stepper.config, model_chunks=[model]), place


def hop(
    rank: int,
    size: int,
    tp: int,
    optimizer: str,
    sharding: str,
    source: str | None,
    target: str | None,
    steps: range,
    dtype: torch.dtype = BF16,
    settings: Mapping[str, Any] | None = None,
) -> tuple[
    tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    dict[str, torch.Tensor],
    dict[str, torch.Tensor],
    int,
]:
    """Load, return the state and the parameters; step, save."""
    model, stepper, place = made(optimizer, sharding, tp, size, dtype, bf16=dtype is BF16, **(settings or {}))
    if source:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load_checkpoint(source, model, stepper)
    loaded = gathered(stepper), {name: param.detach().clone() for name, param in model.named_parameters()}
    for step in steps:
        step_with(model, stepper, place, tp, step, dtype)
    if target:
        save_checkpoint(target, model, stepper)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    return loaded, gathered(stepper), values, place


@pytest.mark.parametrize("optimizer", sometimes(["muon", "soap"], ["soap"]))
def test_state_saved_at_two_ranks_loads_at_any_other(launch, tmp_path, optimizer):
    """One replicated, three and four owners by cost, three by size, two and four under TP: state and next step."""
    pytest.importorskip("megaopt_soap" if optimizer == "soap" else "megaopt_muon")
    source = str(tmp_path / "two")
    (_, saved, _, _), _ = launch(hop, 2, 1, optimizer, "layer_wise", None, source, range(2))
    further = hop(0, 1, 1, optimizer, "replicated", source, None, range(2, 3))
    assert same(further[0][0], saved)
    for size, tp, sharding in (
        (3, 1, "layer_wise"),
        (3, 1, "ping_pong"),
        (4, 1, "layer_wise"),
        (2, 2, "layer_wise"),
        (4, 2, "layer_wise"),
    ):
        for (state, _), _, values, place in launch(
            hop, size, tp, optimizer, sharding, source, None, range(2, 3)
        ):
            assert same(state, saved), (size, tp)
            for name, value in values.items():
                assert torch.equal(value, cut(name, further[2][name], tp, place)), (size, tp, name)


def test_state_saved_under_tensor_parallelism_loads_in_one_process(launch, tmp_path):
    """Owners of joined matrices save them whole."""
    source = str(tmp_path / "cut")
    saved = launch(hop, 4, 2, "muon", "layer_wise", None, source, range(2))[0][1]
    (state, _), _, _, _ = hop(0, 1, 1, "muon", "replicated", source, None, range(0))
    assert same(state, saved)


def test_what_owners_by_size_saved_loads_elsewhere(launch, tmp_path):
    """Saved by three ping-pong ranks: one process, two and four owners by cost, and tensor parallelism, in bits."""
    source = str(tmp_path / "three")
    saved = launch(hop, 3, 1, "muon", "ping_pong", None, source, range(2))[0][1]
    further = hop(0, 1, 1, "muon", "replicated", source, None, range(2, 3))
    assert same(further[0][0], saved)
    for size, tp, sharding in ((2, 1, "layer_wise"), (4, 1, "ping_pong"), (4, 2, "layer_wise")):
        for (state, _), _, values, place in launch(
            hop, size, tp, "muon", sharding, source, None, range(2, 3)
        ):
            assert same(state, saved), (size, tp, sharding)
            for name, value in values.items():
                assert torch.equal(value, cut(name, further[2][name], tp, place)), (size, tp, name)


def test_what_peers_saved_loads_at_any_other_world(launch, tmp_path):
    """Parts of matrices are saved where they lie in the whole: one process, whole owners, other peers, TP 2."""
    source, two = str(tmp_path / "peers"), {"peers_per_matrix": 2}
    (_, saved, _, _), _ = launch(hop, 2, 1, "muon", "layer_wise", None, source, range(2), BF16, two)
    (state, _), _, _, _ = hop(0, 1, 1, "muon", "replicated", source, None, range(0))
    assert same(state, saved)
    for size, tp, settings in ((4, 1, {"peers_per_matrix": 4}), (3, 1, {}), (2, 2, {})):
        for (state, _), _, _, _ in launch(
            hop, size, tp, "muon", "layer_wise", source, None, range(0), BF16, settings
        ):
            assert same(state, saved), (size, tp)


def dies(rank: int, size: int, tp: int) -> str:
    """Rank 1 is killed before the second step; the others report their error."""
    model, stepper, place = build("muon", "layer_wise", tp, size)
    step_with(model, stepper, place, tp, 0, torch.float32)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step_with(model, stepper, place, tp, 1, torch.float32)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_dies_in_mid_step_stops_the_others_in_time(launch, tp):
    """In the exchange of values, and in that of parts."""
    told, _ = launch(dies, 2, tp, group_timeout=10.0, may_die=True)
    assert "another rank has stopped" in told
    assert "Restart all ranks from the last checkpoint" in told


def dies_in_an_exchange(rank: int, size: int, tp: int, folder: str) -> tuple[str, int, float]:
    """Save, and step again: rank 1 is killed when some of what it sends has left; the others report their error."""
    from megaopt_distributed.buffers import point_to_point

    model, stepper, place = build("muon", "layer_wise", tp, size)
    step_with(model, stepper, place, tp, 0, torch.float32)
    save_checkpoint(folder, model, stepper)
    point_to_point.CHUNK = 64  # small matrices travel in several messages, as large ones do
    name = "isend" if tp == 1 else "all_to_all_single"
    send, calls = getattr(dist, name), []

    def sends(*args, **kwargs):
        calls.append(name)
        if len(calls) == 2:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)  # the other one is dead when the next message is begun
        return send(*args, **kwargs)

    setattr(dist, name, sends)
    begun = time.monotonic()
    try:
        step_with(model, stepper, place, tp, 1, torch.float32)
    except CommunicationError as error:
        return str(error), len(calls), time.monotonic() - begun
    return "no error", len(calls), 0.0


@pytest.mark.parametrize(("tp", "what"), [(1, "all-gather of"), (2, "exchange of parameters over 2")])
def test_a_rank_that_dies_inside_an_exchange_and_the_run_goes_on_alone(launch, tmp_path, tp, what):
    """Two ranks, and then one process from the checkpoint before: with the bits of a run without accidents."""
    source = str(tmp_path / "last")
    (told, calls, seconds), _ = launch(dies_in_an_exchange, 2, tp, source, group_timeout=250.0, may_die=True)
    assert calls >= 2
    assert seconds < 150
    assert told.startswith(what)
    assert "another rank has stopped" in told
    assert "Restart all ranks from the last checkpoint" in told
    _, state, values, _ = hop(0, 1, 1, "muon", "layer_wise", source, None, range(1, 3), torch.float32)
    model, stepper, place = build("muon", "replicated")
    for step in range(3):
        step_with(model, stepper, place, 1, step, torch.float32)
    assert same(state, gathered(stepper))
    assert {
        name: torch.equal(param, values[name]) for name, param in model.named_parameters()
    } == dict.fromkeys(values, True)
