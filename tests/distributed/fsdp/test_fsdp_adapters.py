"""Low-rank adapters on models that `fully_shard` has cut: most of every block is frozen, of some all of it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import ThirdParty, alone, batch, build, mesh_of, require_close, train, whole, whole_model

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import temporary_plugin
from torch.distributed.fsdp import fully_shard

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]
KINDS = ("adam", "muon", "newcomer")
RANK = 3


class Adapted(nn.Module):
    """A frozen projection, and a product of two narrow matrices that trains beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        chance = torch.Generator().manual_seed(base.in_features)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        for each in (self.down, self.up):  # not zeros: what is compared moves from the first step on
            each.weight.data = 0.2 * torch.randn(each.weight.shape, generator=chance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both make of an input."""
        return self.base(x) + self.up(self.down(x))


def adapted_model(seed: int = 0) -> nn.Module:
    """Return the model with adapters in all blocks but the first, of which everything is frozen."""
    model = whole_model(seed).requires_grad_(False)
    for block in model.blocks[1:]:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def cut_adapted(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    """Return it cut."""
    model = adapted_model(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adapters(rank: int, size: int, path: str) -> None:
    """Train as one process does, save in the middle, and go on elsewhere."""
    mesh = mesh_of(dp=size)
    with temporary_plugin(ThirdParty(), name="third-party"):
        for kind in KINDS:
            reference, model = adapted_model(), cut_adapted(mesh)
            before = {name: whole(param) for name, param in model.named_parameters()}
            theirs, ours = build(reference, kind, alone()), build(model, kind, mesh)
            expected = train(reference, theirs, range(4), replicas=size)
            norms = train(model, ours, range(2), mesh)
            save_checkpoint(f"{path}-{kind}", model, ours)
            again = cut_adapted(mesh, seed=1)
            others = build(again, kind, mesh)
            load_checkpoint(f"{path}-{kind}", again, others)
            for net, optimizer in ((model, ours), (again, others)):
                assert norms + train(net, optimizer, range(2, 4), mesh) == pytest.approx(expected, rel=1e-6)
                require_close(net, reference)
            moved = {
                name
                for name, param in model.named_parameters()
                if not torch.equal(whole(param), before[name])
            }
            assert moved == {name for name, param in model.named_parameters() if param.requires_grad}
            assert len(moved) == 8


def test_adapters_train_as_in_one_process(launch, tmp_path) -> None:
    """Element-wise, split and whole steps; what is frozen stays as it was; checkpoints hold both."""
    launch(adapters, 2, str(tmp_path / "saved"))


def real_adapters(rank: int, size: int) -> None:
    """Cut a small Llama with adapters of peft, and train it beside one that is whole."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def made() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        targets = ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=targets, layers_to_transform=[1], init_lora_weights=False)
        return get_peft_model(llama, config)

    def loss(model: nn.Module, step: int, replica: int) -> torch.Tensor:
        tokens = batch(step, replica)
        return model(input_ids=tokens, labels=tokens).loss

    mesh = mesh_of(dp=size)
    reference, model = made(), made()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    theirs, ours = build(reference, "muon", alone()), build(model, "muon", mesh)
    assert {row.optimizer for row in ours.report().params} == {"muon"}
    assert len(ours.report().params) == 6
    for step in range(4):
        theirs.zero_grad()
        ours.zero_grad()
        (sum(loss(reference, step, other) for other in range(size)) / size).backward()
        loss(model, step, rank).backward()
        assert ours.step().grad_norm == pytest.approx(theirs.step().grad_norm, rel=1e-5)
    require_close(model, reference)


def test_adapters_of_peft_train_as_in_one_process(launch) -> None:
    """Adapters in one of two layers of a Llama: the other one has nothing that trains."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    launch(real_adapters, 2)
