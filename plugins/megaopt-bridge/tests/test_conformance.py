"""Classes of torch through the bridge pass the conformance kit, but for what their recipes say."""

import pytest
from conformance import make, sometimes_long, tabled

pytestmark = pytest.mark.any_python

pytest.importorskip("megaopt_adam")

CLASSES = ("Adafactor", "Adagrad", "AdamW", "Muon", "RMSprop", "Rprop", "SGD")
"""One of each kind; `tox run -e bridge-table` makes the checks of all."""

OFTEN = ("torch:SGD", "torch:Adafactor", "torch:Muon")
"""Those whose checks plain `tox` makes."""


@pytest.mark.parametrize(
    "check", sometimes_long(tabled((f"torch:{name}" for name in CLASSES), lr=0.01), *OFTEN)
)
def test_conformance(check) -> None:
    """Every check, of classes of torch that differ in how they may be cut and in what they keep."""
    make(check)


@pytest.mark.parametrize("check", sometimes_long(tabled(["torch:Adadelta"], lr=1.0)))
def test_conformance_at_a_rate_of_one(check) -> None:
    """Adadelta finds the size of its steps by itself; `lr` is a factor on it, 1 by default."""
    make(check)
