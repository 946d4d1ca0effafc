"""The page on owner plans: its example runs, its tables are what the benchmark found, and plans are even."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "owner-plans.md").read_text()
ROWS = json.loads((ROOT / "benchmarks" / "results" / "balance.json").read_text())["rows"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with its neighbours."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("balance")


def test_the_example_runs() -> None:
    """Its assertions hold."""
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(example, {})  # noqa: S102 - running the example is the test


def test_the_tables_are_what_the_benchmark_wrote(benchmark: ModuleType) -> None:
    """Row by row."""
    for form, ranks in (("matrices", (8, 64, 128, 256, 512)), ("batches", (64, 128, 512))):
        rows = [row for row in ROWS if row["experts"] == form and row["ranks"] in ranks]
        assert "\n".join(benchmark.table(rows)) in PAGE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['experts']}-{row['ranks']}")
def test_every_plan_is_even_where_whole_matrices_can_be(row: dict[str, object]) -> None:
    """To 3 %, with padding below 4 % and in less than 5 seconds; and no plan takes longer than whole owners."""
    plan, whole = row["plan"], row["whole"]
    assert isinstance(plan, dict)
    assert isinstance(whole, dict)
    largest, seconds = row["largest_over_mean"], row["planning_seconds"]
    assert isinstance(largest, float)
    assert isinstance(seconds, float)
    assert plan["padding"] <= 0.04
    assert seconds < 5
    assert plan["step_ms"] <= whole["step_ms"]
    if largest <= 1 / 3 or row["experts"] == "batches":
        assert plan["compute"] <= 1.03
        assert plan["state_bytes"] <= 1.1


@pytest.mark.parametrize(
    ("model", "form", "ranks"), [("Llama-3 70B", "matrices", 512), ("gpt-oss-120b", "batches", 64)]
)
def test_the_results_can_be_had_again(benchmark: ModuleType, model: str, form: str, ranks: int) -> None:
    """The same figures, but for the time that planning takes."""
    (written,) = [row for row in ROWS if (row["model"], row["experts"], row["ranks"]) == (model, form, ranks)]
    assert {
        **benchmark.figures(model, form, ranks),
        "planning_seconds": written["planning_seconds"],
    } == written
