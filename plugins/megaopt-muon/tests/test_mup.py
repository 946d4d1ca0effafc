"""muP under Muon: what Muon steps is left alone, whatever else is a matrix is scaled."""

import pytest
import torch

from megaopt_core import OptimizerConfig, build_optimizer, get_mup_config_overrides

pytestmark = pytest.mark.any_python


class Model(torch.nn.Module):
    """An embedding, two hidden matrices, one of which Muon must not step, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.kept = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.hidden.weight.use_muon = True
        self.kept.weight.use_muon = False
        self.head.weight.is_embedding_or_output_parameter = True


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_matrices_of_the_scalar_optimizer_are_scaled(name):
    """Head and `use_muon=False` get lr/m without an eps; the rest keeps its learning rate."""
    settings = {"lr": 0.4, "min_lr": 0.04, "muon_scale_mode": "unit_rms_norm"}
    overrides = get_mup_config_overrides(OptimizerConfig(optimizer=name, **settings), 4.0)
    optimizer = build_optimizer(Model(), name, overrides=overrides, **settings)
    lr = {row.name: row.lr for row in optimizer.report().params}
    scaled = {"kept.weight", "head.weight"}
    assert {each for each, value in lr.items() if value == pytest.approx(0.1)} == scaled
    assert {value for each, value in lr.items() if each not in scaled} == {0.4}
    assert {group.get("eps", 1e-8) for group in optimizer.param_groups} == {1e-8}


def test_a_scale_that_grows_with_the_width_is_warned_of():
    """Only one of the scales is right at every width."""
    config = OptimizerConfig(optimizer="muon", lr=0.4, muon_scale_mode="spectral")
    with pytest.warns(UserWarning, match="muon_scale_mode='spectral': updates grow with the width"):
        get_mup_config_overrides(config, 4.0)
    assert get_mup_config_overrides(config, 1.0) == {}
