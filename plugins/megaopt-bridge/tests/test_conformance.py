"""Classes of torch through the bridge pass the conformance kit, but for what their recipes say."""

import pytest
from conformance import make, tabled

pytestmark = pytest.mark.any_python

pytest.importorskip("megaopt_adam")

CLASSES = (
    "ASGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


@pytest.mark.parametrize("check", tabled((f"torch:{name}" for name in CLASSES), lr=0.01), ids=str)
def test_conformance(check) -> None:
    """Every check, of every class of torch that steps dense gradients without a closure."""
    make(check)


@pytest.mark.parametrize("check", tabled(["torch:Adadelta"], lr=1.0), ids=str)
def test_conformance_at_a_rate_of_one(check) -> None:
    """Adadelta finds the size of its steps by itself; `lr` is a factor on it, 1 by default."""
    make(check)
