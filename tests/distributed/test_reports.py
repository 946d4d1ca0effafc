"""A report says how the work is shared over ranks, and which numbers are those of one rank."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")


def report_after_a_step(rank: int, size: int, sharding: str) -> tuple[list[tuple], str]:
    """Step once, and return what the report says of each optimizer, with the text."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    for layer in model[:3]:
        layer.weight.matrix_view = MatrixView()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    if sharding == "fsdp":
        grads = {name: param.grad for name, param in model.named_parameters()}
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        for name, param in model.named_parameters():
            param.grad = torch.distributed.tensor.distribute_tensor(
                grads[name], param.device_mesh, param.placements
            )
    optimizer = build_optimizer(model, "muon", lr=0.01, sharding=sharding)
    optimizer.step()
    report = optimizer.report(after_step=True)
    return [(part.strategy, part.changed, part.stepped) for part in report.parts], report.summary()


@pytest.mark.parametrize(
    ("sharding", "strategies"),
    [("layer_wise", ("layer_wise", "distributed")), ("fsdp", ("fsdp", "fsdp"))],
)
def test_what_ranks_share_is_counted_on_one_rank_and_says_so(launch, sharding, strategies):
    """All ranks together step every matrix; each row names its strategy."""
    found = launch(report_after_a_step, 2, sharding)
    for parts, text in found:
        assert tuple(strategy for strategy, _, _ in parts) == strategies
        assert "changed on this rank in last step" in text
        for row, (strategy, changed, stepped) in zip(text.splitlines()[2:4], parts, strict=True):
            assert f" {strategy} " in row
            assert f" {changed} of {stepped} (all values compared)" in row
    owned = [parts[0][2] for parts, _ in found]
    assert sum(owned) == (3 if sharding == "layer_wise" else 6)


def test_what_every_rank_steps_whole_is_told_without_a_strategy(launch):
    """As in one process."""
    for parts, text in launch(report_after_a_step, 2, "replicated"):
        assert [strategy for strategy, _, _ in parts] == ["replicated", "replicated"]
        assert "changed in last step" in text
        assert "3 of 3 (all values compared)" in text
        assert "strategy" not in text
