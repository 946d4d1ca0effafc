"""Classes of other packages: a dozen pass the kit here; the table of all is the page `bridge-classes`."""

import importlib.util

import pytest
import torch
from conformance import TABLE, make, sometimes_long, tabled
from megaopt_bridge.recipes import RECIPES
from megaopt_testing import CHECKS, TinyGPT

from megaopt_core import build_optimizer, get_registry
from megaopt_core.errors import PluginError

pytestmark = pytest.mark.any_python

pytest.importorskip("megaopt_adam")

CLASSES = {
    "pytorch_optimizer": ["po:ADOPT", "po:Lamb", "po:Muon", "po:AdEMAMix", "po:Yogi", "po:StableAdamW"],
    "schedulefree": ["schedulefree:AdamWScheduleFree", "schedulefree:SGDScheduleFree"],
    "emerging_optimizers": ["emerging:Scion", "emerging:Lion"],
}
OFTEN = ("po:ADOPT", "schedulefree:AdamWScheduleFree")
"""Those whose checks plain `tox` makes."""
NAMES = [name for package, names in CLASSES.items() if importlib.util.find_spec(package) for name in names]


@pytest.mark.parametrize("check", sometimes_long(tabled(NAMES, lr=0.01), *OFTEN))
def test_conformance(check) -> None:
    """Every check of the table, which says which of them fail."""
    make(check)


@pytest.mark.skipif(importlib.util.find_spec("prodigyopt") is None, reason="prodigyopt is not installed")
@pytest.mark.parametrize("check", tabled(["prodigyopt:Prodigy"], lr=1.0), ids=str)
def test_conformance_at_a_rate_of_one(check) -> None:
    """Prodigy finds its learning rate by itself; `lr` is a factor on it, 1 by default."""
    make(check)


@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        ("po:ADOPT", "element"),
        ("po:Lamb", "tensor"),
        ("po:Muon", "tensor"),
        ("po:DAdaptAdam", "group"),
        ("po:Prodigy", "group"),
        ("schedulefree:AdamWScheduleFree", "element"),
        ("prodigyopt:Prodigy", "group"),
    ],
)
def test_how_finely_known_classes_may_be_cut(name, granularity) -> None:
    """As their papers have it."""
    pytest.importorskip({"po": "pytorch_optimizer"}.get(name.partition(":")[0], name.partition(":")[0]))
    assert get_registry().optimizer(name).granularity.value == granularity


@pytest.mark.parametrize(
    ("name", "told"),
    [("torchao:AdamW8bit", "megaopt-device"), ("torchao:CPUOffloadOptimizer", "wraps another")],
)
def test_torchaos_own_tensors_are_refused_in_words(name, told) -> None:
    """What they hold can be neither compared nor cut."""
    pytest.importorskip("torchao.optim")
    with pytest.raises(PluginError, match=told):
        get_registry().optimizer(name)


def test_modes_reach_the_class() -> None:
    """A schedule-free optimizer trains from the beginning; `eval` shows its average, `train` goes on."""
    pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    model = TinyGPT()
    built = build_optimizer(model, "schedulefree:AdamWScheduleFree", lr=1e-2)
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        built.step()
    training = model.head.weight.detach().clone()
    built.eval()
    average = model.head.weight.detach().clone()
    built.train()
    assert not torch.equal(average, training)
    torch.testing.assert_close(model.head.weight.detach(), training)


def test_who_shares_first_steps_says_so() -> None:
    """Found by trying: with equal betas AdEMAMix begins as AdamW, ADOPT as nobody."""
    pytest.importorskip("pytorch_optimizer")
    shared = {name: get_registry().optimizer(name).same_as for name in ("po:AdEMAMix", "po:ADOPT")}
    assert shared == {"po:AdEMAMix": "torch.optim:AdamW", "po:ADOPT": None}


def test_no_reason_for_a_failure_is_stale() -> None:
    """What the page says why of is what fails; where no recipe says why, it shows the kit's own words."""
    failed = {
        (name, id_)
        for name, found in TABLE.items()
        for id_, status in found.get("checks", {}).items()
        if status == "failed"
    }
    explained = {
        (f"{source}:{name}", id_)
        for source, recipes in RECIPES.items()
        for name, recipe in recipes.items()
        for id_ in recipe.fails
    }
    assert {id_ for _, id_ in explained} <= {check.id for check in CHECKS}
    assert sorted(explained - failed) == []
