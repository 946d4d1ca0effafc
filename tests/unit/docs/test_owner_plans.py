"""The page on owner plans: its example runs, its tables are what the benchmark found, and plans are even."""

import importlib
import itertools
import json
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
from attrs import evolve

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from megaopt_layerwise.planner import CostModel, Division, Work, plan_owners

pytestmark = pytest.mark.any_python

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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['experts']}-{row['ranks']}")
def test_only_plans_that_no_other_beats_are_less_even(row: dict[str, object]) -> None:
    """Than 5 % in operations and 10 % in bytes: what is, has the shortest step of all plans, or of all level ones."""
    plan, least = row["plan"], row["least"]
    assert isinstance(plan, dict)
    assert isinstance(least, dict)
    assert plan["step_ms"] >= least["step_ms"] * (1 - 1e-3)
    if plan["compute"] > 1.05:
        assert plan["step_ms"] <= least["step_ms"] * (1 + 1e-3)
    if plan["state_bytes"] > 1.1:
        assert plan["step_ms"] < least["step_ms_with_level_state"]


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_below_the_bounds(benchmark: ModuleType, seed: int) -> None:
    """Of random works, shared out whole, with peers, and by every way there is to put few whole ones on two ranks."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret
    works = [
        Work(
            str(at),
            cost=4e12 * chance.choice([1.0, 2.5, 7.0]),
            numel=1,
            state_bytes=8.0 * chance.choice([1, 3]),
            most_peers=chance.choice([1, 8]),
            repeated=0.2,
            exchanged=1e6 * chance.random(),
        )
        for at in range(chance.choice([5, 9]))
    ]
    for ranks in (2, 4, 6):
        bounds = benchmark.Bounds(works, ranks, CostModel())
        for divisions in ([Division.WHOLE], list(Division)):
            plan = plan_owners(works, ranks, divisions=divisions)
            assert plan.step_seconds >= bounds.step_seconds() * (1 - 1e-6)
            assert plan.step_seconds >= bounds.step_seconds(plan.memory_imbalance + 1e-9) * (1 - 1e-6)
            assert max(plan.costs) >= bounds.operations() * (1 - 1e-6)
    alone = [evolve(work, most_peers=1) for work in works]
    best = min(
        max(
            sum(work.cost for work, place in zip(alone, places, strict=True) if place == rank)
            for rank in (0, 1)
        )
        for places in itertools.product((0, 1), repeat=len(alone))
    )
    assert benchmark.Bounds(alone, 2, CostModel()).operations() <= best * (1 + 1e-6)


def test_bounds_are_tight_where_parts_exclude_each_other(benchmark: ModuleType) -> None:
    """Three equal works on two ranks make two of them stand together; level state makes a work have dear peers."""
    three = [Work(str(at), 4e14, 1, 8.0, most_peers=2, repeated=0.5) for at in range(3)]
    alone = [evolve(work, most_peers=1) for work in three]
    assert benchmark.Bounds(alone, 2, CostModel()).step_seconds() == pytest.approx(2.0, rel=1e-6)
    free = CostModel(latency=0.0)
    assert benchmark.Bounds(three, 2, free).step_seconds() == pytest.approx(1.75, rel=1e-6)
    dear = [evolve(three[0], exchanged=6e11)]
    assert benchmark.Bounds(dear, 2, free).step_seconds() == pytest.approx(1.0, rel=1e-6)
    assert benchmark.Bounds(dear, 2, free).step_seconds(1.1) == pytest.approx(2.75, rel=1e-6)


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
