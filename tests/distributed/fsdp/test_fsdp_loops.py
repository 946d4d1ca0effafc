"""What users do around a step with FSDP2 models: accumulation, clipping, freezing, tied and unused parameters."""

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import (
    ThirdParty,
    alone,
    batch,
    build,
    cut_model,
    mesh_of,
    nothing_gathered,
    require_close,
    train,
    whole,
    whole_model,
)

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import temporary_plugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megaopt_core.errors import CommunicationError, RankMismatchError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]
KINDS = ("muon", "newcomer")


def several(rank: int, size: int, names: list[str]) -> dict:
    """Run some of the scenarios below with an optimizer that splits and one that does not."""
    mesh = mesh_of(dp=size)
    told = {}
    with temporary_plugin(ThirdParty(), name="third-party"):
        for name in names:
            for kind in KINDS:
                told[name, kind] = SCENARIOS[name](kind, mesh, rank)
    return told


def accumulation(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """Two backward passes a step, of which the first sends no gradients."""
    reference, model = whole_model(), cut_model(mesh)
    theirs, ours = build(reference, kind, alone()), build(model, kind, mesh)
    for step in range(3):
        theirs.zero_grad()
        ours.zero_grad()
        for part in range(2):
            sum(reference(batch(2 * step + part, other)) / 4 for other in range(2)).backward()
            model.set_requires_gradient_sync(part == 1)
            (model(batch(2 * step + part, rank)) / 2).backward()
        assert ours.step().grad_norm == pytest.approx(theirs.step().grad_norm, rel=1e-6)
    require_close(model, reference)


def torch_clips(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """`torch.nn.utils.clip_grad_norm_` before a step that does not clip; the same norm, the same parameters."""
    reference, model = whole_model(), cut_model(mesh)
    theirs, ours = (
        build(net, kind, groups, clip_grad=0.0, log_num_zeros_in_grad=True)
        for net, groups in ((reference, alone()), (model, mesh))
    )
    for step in range(3):
        theirs.zero_grad()
        ours.zero_grad()
        sum(reference(batch(step, other)) / 2 for other in range(2)).backward()
        model(batch(step, rank)).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(whole(found), expected)
        assert ours.step().num_zeros_in_grad == theirs.step().num_zeros_in_grad
    require_close(model, reference)


def frozen_and_unused(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """A frozen matrix beside one that trains, and a block that is left out in every other step."""
    reference, model = whole_model(), whole_model()
    for net in (reference, model):
        net.first.weight.requires_grad_(False)
        net.blocks[1].up.weight.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    theirs, ours = build(reference, kind, alone()), build(model, kind, mesh)
    middle = {net: net.blocks[1] for net in (reference, model)}
    for step in range(4):
        for net in (reference, model):
            net.blocks[1] = middle[net] if step % 2 else nn.Identity()
        theirs.zero_grad()
        ours.zero_grad()
        sum(reference(batch(step, other)) / 2 for other in range(2)).backward()
        model(batch(step, rank)).backward()
        assert (middle[model].down.weight.grad is None) == (step % 2 == 0)
        with nothing_gathered():
            norm = ours.step().grad_norm
        assert norm == pytest.approx(theirs.step().grad_norm, rel=1e-6)
    require_close(model, reference)


class Tied(nn.Module):
    """A table that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.inner = nn.Linear(12, 12)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(
            self.head(self.inner(self.table(tokens))).flatten(0, 1), tokens.flatten()
        )


def tied(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """The table and the head are one parameter, which is stepped once."""
    torch.manual_seed(0)
    reference = Tied()
    torch.manual_seed(0)
    model = fully_shard(Tied(), mesh=mesh)
    expected = train(reference, build(reference, kind, alone()), range(4), replicas=2)
    optimizer = build(model, kind, mesh)
    assert train(model, optimizer, range(4), mesh) == pytest.approx(expected, rel=1e-6)
    require_close(model, reference)
    assert [row.name for row in optimizer.report().params].count("table.weight") == 1


def mixed_precision(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """Float32 parameters, computed with in bfloat16: what is stepped is float32; losses fall."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = cut_model(mesh, mp_policy=policy)
    optimizer = build(model, kind, mesh)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(model(batch(0)))
        losses[-1].backward()
        optimizer.step()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]


def not_finite(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """With main parameters of bfloat16 ones: an infinite gradient on one rank is found by all."""
    model = cut_model(mesh, dtype=torch.bfloat16)
    optimizer = build(model, kind, mesh, bf16=True, loss_scale=1.0)
    model(batch(0, rank)).backward()
    assert optimizer.step().update_successful is True
    optimizer.zero_grad()
    model(batch(1, rank)).backward()
    if rank == 1:
        model.blocks[0].down.weight.grad.to_local().view(-1)[0] = float("inf")
    before = {name: whole(param) for name, param in model.named_parameters()}
    assert optimizer.step().update_successful is False
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), before[name])


def bytes_of_a_step(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """Counted at the process group: what the report plans, and what owners have not got themselves, there and back."""
    model = cut_model(mesh)
    optimizer = build(model, kind, mesh)
    train(model, optimizer, range(2), mesh)
    report = optimizer.report(after_step=True)
    rows = [row for row in report.params if row.travels]
    (part,) = (part for part in report.parts if part.sent is not None)
    assert part.sent == sum(row.bytes for row in rows)
    assert f"{part.sent:,} B in 2 collectives" in report.summary()
    total = torch.tensor(float(part.sent))
    dist.all_reduce(total)
    expected, bound = 0, 0.0
    for row in rows:
        param = model.get_parameter(row.name)
        first = -(-param.shape[0] // 2)
        own = first if row.owner == "dp 0" else param.shape[0] - first
        expected += 2 * 4 * (param.shape[0] - own) * (param.numel() // param.shape[0])
        bound += 2 * (1 - 1 / 2) * 4 * param.numel()
    assert total.item() == expected
    assert expected <= 1.05 * bound  # shards are uneven; of even ones it is the bound


def compiled(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """Blocks that are compiled before they are cut."""
    reference, model = whole_model(), whole_model()
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = train(reference, build(reference, kind, alone()), range(3), replicas=2)
    assert train(model, build(model, kind, mesh), range(3), mesh) == pytest.approx(expected, rel=1e-6)
    require_close(model, reference)


SCENARIOS = {
    name.__name__: name
    for name in (
        accumulation,
        torch_clips,
        frozen_and_unused,
        tied,
        mixed_precision,
        not_finite,
        compiled,
        bytes_of_a_step,
    )
}


def test_loops_of_all_kinds_do_as_one_process_does(launch) -> None:
    """Every scenario on two ranks, with a split and with a whole step."""
    launch(several, 2, list(SCENARIOS))


def reduced_later(rank: int, size: int) -> None:
    """Copies add their gradients up in the second of two backward passes; the norm and the clipping are of the sum."""
    mesh = mesh_of(dp_replicate=2, dp=2)
    with temporary_plugin(ThirdParty(), name="third-party"):
        for kind in KINDS:
            reference, model = whole_model(), cut_model(mesh)
            theirs, ours = build(reference, kind, alone()), build(model, kind, mesh)
            for step in range(3):
                theirs.zero_grad()
                ours.zero_grad()
                for part in range(2):
                    at = 2 * step + part
                    sum(reference(batch(at, other)) / 8 for other in range(size)).backward()
                    model.set_requires_all_reduce(part == 1)
                    (model(batch(at, rank)) / 2).backward()
                expected = theirs.step().grad_norm
                assert ours.step().grad_norm == pytest.approx(expected, rel=1e-6), kind
                assert expected > 0.5, "it is clipped"
            require_close(model, reference)


def test_copies_may_add_gradients_up_later(launch) -> None:
    """HSDP with `set_requires_all_reduce`."""
    launch(reduced_later, 4)


def offloaded(rank: int, size: int) -> None:
    """Where the accelerator is the CPU itself nothing has to move: parameters that are offloaded train."""
    mesh = mesh_of(dp=size)
    reference, model = whole_model(), cut_model(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    expected = train(reference, build(reference, "muon", alone()), range(3), replicas=size)
    assert train(model, build(model, "muon", mesh), range(3), mesh) == pytest.approx(expected, rel=1e-6)
    require_close(model, reference)


def test_offloaded_parameters_are_stepped_where_they_lie(launch) -> None:
    """`CPUOffloadPolicy` is honoured."""
    launch(offloaded, 2)


def one_is_killed(rank: int, size: int, kind: str, path: str) -> tuple[str, float]:
    """Save, and kill rank 1 when it is about to answer an exchange; return what the other hears, and how soon."""
    mesh = mesh_of(dp=size)
    model = cut_model(mesh)
    with temporary_plugin(ThirdParty(), name="third-party"):
        optimizer = build(model, kind, mesh)
    train(model, optimizer, range(1), mesh)
    save_checkpoint(path, model, optimizer)
    model(batch(1, rank)).backward()
    if rank == 1:
        import os

        from megaopt_fsdp.mail import Mail

        Mail.back = lambda *_: os._exit(0)
    begun = time.monotonic()
    try:
        optimizer.step()
    except CommunicationError as error:
        return str(error), time.monotonic() - begun
    return "no error", 0.0


def resumed(rank: int, size: int, kind: str, path: str) -> None:
    """Go on from what was saved, as one process does that nobody has disturbed."""
    mesh = mesh_of(dp=size)
    reference, model = whole_model(), cut_model(mesh, seed=1)
    with temporary_plugin(ThirdParty(), name="third-party"):
        theirs, ours = build(reference, kind, alone()), build(model, kind, mesh)
    load_checkpoint(path, model, ours)
    expected = train(reference, theirs, range(3), replicas=size)
    assert train(model, ours, range(1, 3), mesh) == pytest.approx(expected[1:], rel=1e-6)
    require_close(model, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_inside_an_exchange_is_an_error_on_the_others(launch, kind, tmp_path) -> None:
    """In time, in words that say what to do; and that works."""
    path = str(tmp_path / "saved")
    (words, seconds), _ = launch(one_is_killed, 2, kind, path, group_timeout=30.0, may_die=True)
    assert words.startswith("the exchange of ")
    assert "Restart all ranks from the last checkpoint" in words
    assert seconds < 150.0
    launch(resumed, 2, kind, path)


def plans_differ(rank: int, size: int) -> None:
    """Let rank 1 plan for another world."""
    from megaopt_fsdp.layout import FsdpLayout

    mesh = mesh_of(dp=size)
    model = cut_model(mesh)
    if rank == 1:
        told = FsdpLayout.digest
        FsdpLayout.digest = lambda self, *, is_expert: told(self, is_expert=is_expert)[::-1]
    with pytest.raises(RankMismatchError, match="ranks have planned other owners than rank 0: rank 1"):
        build(model, "muon", mesh)


def test_plans_are_compared_once(launch) -> None:
    """Ranks that plan other owners hear of it when they build."""
    launch(plans_differ, 2)
