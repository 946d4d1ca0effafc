"""The page of other packages' classes is what the script makes of its results, with every check of the kit."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from megaopt_testing import CHECKS

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "benchmarks"

if not (SCRIPTS / "bridge_page.py").exists():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RESULTS = json.loads((SCRIPTS / "results" / "bridge.json").read_text())


def test_the_page_is_made_of_the_results() -> None:
    """After a change to either: `python benchmarks/bridge_table.py --page docs/bridge-classes.md`."""
    assert (ROOT / "docs" / "bridge-classes.md").read_text() == _script("bridge_page").page(RESULTS)


def test_a_check_that_was_not_run_is_shown() -> None:
    """The page numbers every check of the installed kit, and marks what its results do not hold."""
    found = {
        "granularity": "element",
        "checks": {CHECKS[0].id: "passed", CHECKS[1].id: "failed"},
        "messages": {CHECKS[1].id: "'made:Up': it forgets. Keep it"},
    }
    text = _script("bridge_page").page({"python": "3", "classes": {"made:Up": found}})
    row = next(line for line in text.splitlines() if line.startswith("| `made:Up` | element"))
    assert row.count("✓") == row.count("✗") == 1
    assert row.count(" ? ") == len(CHECKS) - 2
    assert f"{len(CHECKS)} `{CHECKS[-1].id}`" in text
    assert "| `made:Up` | `bit_exact_resume` | it forgets |" in text


def test_what_was_checked_alike_is_not_checked_again() -> None:
    """Other versions make all checks be made again; of a kit that has grown, the new ones."""
    table = _script("bridge_table")
    versions, ids = table.versions_for("torch:NAdam"), [check.id for check in CHECKS]
    whole = {"versions": versions, "checks": dict.fromkeys(ids, "passed")}
    assert table.missing("torch:NAdam", whole) == []
    assert table.missing("torch:LBFGS", {"versions": versions, "refused": "it needs a closure"}) == []
    assert table.missing("torch:NAdam", None) == ids
    assert table.missing("torch:NAdam", {**whole, "versions": {"torch": "1.0"}}) == ids
    assert table.missing("torch:NAdam", {**whole, "checks": {ids[0]: "passed"}}) == ids[1:]


def test_what_is_found_joins_what_was_known() -> None:
    """In the order of the kit; a check that was made anew has its new result alone."""
    table = _script("bridge_table")
    first, second, third = (check.id for check in CHECKS[:3])
    versions = table.versions_for("torch:NAdam")
    before = {
        "versions": versions,
        "seconds": 1.0,
        "checks": {first: "failed", third: "failed"},
        "messages": {first: "old", third: "stays"},
    }
    found = {"seconds": 0.5, "checks": {second: "passed", first: "passed"}, "messages": {}}
    assert table.joined("torch:NAdam", before, found) == {
        "versions": versions,
        "seconds": 1.5,
        "checks": {first: "passed", second: "passed", third: "failed"},
        "messages": {third: "stays"},
    }
    assert list(table.joined("torch:NAdam", before, found)["checks"]) == [first, second, third]
    older = {**before, "versions": {"torch": "1.0"}}
    assert table.joined("torch:NAdam", older, found) == {"versions": versions, **found}
    assert table.joined("torch:NAdam", before, {"refused": "why"}) == {"versions": versions, "refused": "why"}


def test_classes_are_checked_beside_each_other(monkeypatch) -> None:
    """Each in a process of its own; what raises, or ends, says so, and nothing is begun after the time."""
    table = _script("bridge_table")

    def checked(name, ids):
        if name == "torch:Ends":
            raise SystemExit(3)
        return {"name": name, "ids": ids}

    monkeypatch.setattr(table, "checked", checked)
    asked = {"torch:One": ["report"], "torch:Ends": [], "torch:Two": []}
    found = dict(table.in_turn(asked, 2, table.time.monotonic() + 60))
    assert found == {
        "torch:One": {"name": "torch:One", "ids": ["report"]},
        "torch:Ends": {"error": "SystemExit: 3"},
        "torch:Two": {"name": "torch:Two", "ids": []},
    }
    assert list(table.in_turn(asked, 2, table.time.monotonic() - 1)) == []
