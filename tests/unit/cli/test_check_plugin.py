"""`megaopt check-plugin` runs the conformance kit and says what failed."""

import json

import pytest

from megaopt_core.cli import main
from megaopt_core.testing import CHECKS

PLUGIN = """
class Frozen(torch.optim.SGD):
    def step(self, closure=None):
        return None

@hookimpl
def megaopt_optimizer_entries():
    return {"adagrad": OptimizerEntry(torch.optim.Adagrad), "idle": OptimizerEntry(Frozen)}
"""


@pytest.fixture(autouse=True)
def _two(plugins) -> None:
    plugins.install("two", PLUGIN)
    plugins.install("nothing")
    plugins.registry()


def test_a_good_optimizer_passes(capsys) -> None:
    """One line a check, and exit status 0."""
    assert main(["check-plugin", "adagrad", "--set", "lr=0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "adagrad (megaopt-two 1.0)"
    results = [line.split() for line in lines if line.startswith(("  passed", "  skipped", "  failed"))]
    assert [words[1] for words in results] == [check.id for check in CHECKS]
    assert {words[0] for words in results} == {"passed", "skipped"}
    assert lines[-1] == f"{len(CHECKS)} checks, 0 failed"


def test_a_plugins_name_means_all_of_its_optimizers(capsys) -> None:
    """A failed check is exit status 1, and does not stop the others."""
    assert main(["check-plugin", "two", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert [result["optimizer"] for result in results] == ["adagrad"] * len(CHECKS) + ["idle"] * len(CHECKS)
    assert {result["optimizer"] for result in results if result["status"] == "failed"} == {"idle"}


def test_there_is_nothing_to_check(capsys) -> None:
    """A plugin without optimizers, and a name that nobody knows."""
    assert main(["check-plugin", "nothing"]) == 2
    assert capsys.readouterr().err == (
        "megaopt: error: plugin 'nothing' (megaopt-nothing 1.0) offers no optimizer: there is nothing to check\n"
    )
    assert main(["check-plugin", "adagrat"]) == 2
    assert "did you mean 'adagrad'?" in capsys.readouterr().err
