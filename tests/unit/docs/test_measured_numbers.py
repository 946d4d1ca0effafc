"""The numbers that pages show are those that `benchmarks/results/` holds, and no page denies what was measured."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
GENERATED = ("bridge-classes", "gallery", "plugins", "measurements")
"""Pages that a script writes from the results."""


def _result(name: str) -> Any:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def _measurements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measurements", BENCHMARKS / "measurements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _row(page: str, label: str, number: int = 0) -> list[str]:
    """Return the cells after the label of the row that begins with it; `number` counts rows with one label."""
    text = (ROOT / page).read_text()
    found = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    assert number < len(found) > 0, f"{page} has {len(found)} rows {label!r}"
    return [cell.strip() for cell in found[number].strip("|").split("|")][1:]


Claim = tuple[str, str, int, list[float | None]]
"""Page, label of a row, which of the rows with that label, and the numbers of its cells; None: not compared."""


def _gpu_claims() -> Iterator[Claim]:
    gpu = _result("gpu_nvidia_h200")
    labels = {
        "GPT-2 124M": ("gpt2", "GPT-2 124M, 48 matrices"),
        "a block of Llama 8B": ("llama_8b", "a block of Llama 8B"),
        "moe": ("moe", "128 matrices of 2048 x 1408"),
    }
    for label, (suite, row) in labels.items():
        found = gpu["muon"][suite]
        times, over = found["median_ms"], found["speedup_over"]
        peers = [over[each] for each in ("emerging-optimizers", "torch", "gram-newton-schulz")]
        share = found["share_of_bf16_peak"]["found"]
        yield "docs/muon-computation.md", row, 0, [times["megaopt"], *peers, share]
        if label != "moe":
            told = [times[each] for each in ("megaopt", "emerging-optimizers", "torch")]
            yield "README.md", f"{label}, H200", 0, told
    for label, found in gpu["graphs"].items():
        ratios = [found["speedup_over"]["eager"], found["on_an_idle_device"]["speedup_over"]["eager"]]
        yield "docs/graphs.md", label, 0, [found["median_ms"]["eager"], found["median_ms"]["graph"], *ratios]
    for label, found in gpu["offload"].items():
        yield "docs/memory.md", f"`{label}`", -1, list(found["to_in_place"]["median_ms"].values())
    for label, found in gpu["memory"].items():
        yield "docs/memory.md", label, 0, [found["documented"], found["kept"], found["peak"]]


def _muon_and_lion_claims() -> Iterator[Claim]:
    times = _result("muon_gpt2_2_threads_avx512_bf16")["medium"]["times"]
    columns = ("megaopt", "emerging-optimizers", "torch", "pytorch_optimizer")
    told: list[float | None] = [times[each]["median_ms"] for each in columns]
    yield "README.md", "a block of GPT-2, two cores", 0, told
    for number, kind in enumerate(("amx_bf16", "neither", "avx512_bf16")):
        lion = _result(f"lion_{kind}")
        faster, share, times = lion["emerging_optimizers_over"], lion["one_flat_pass_over"], lion["times"]
        for label, name in (
            ("megaopt, plain", "megaopt_plain"),
            ("megaopt, compiled", "megaopt_compiled"),
        ):
            numbers = [times[name]["median_ms"], faster[name]["median"], share[name]["median"]]
            yield "docs/lion.md", label, number, numbers
        yield "docs/lion.md", "one flat pass", number, [times["one_flat_pass"]["median_ms"], None, None]


def _rank_claims() -> Iterator[Claim]:
    for dtype, precision in (("float32", "highest"), ("float32", "medium"), ("bfloat16", "medium")):
        found = _result(f"layerwise_{dtype}_{precision}_12_layers")
        over = found["emerging_optimizers_over"]
        numbers = [
            over["megaopt, layer_wise"]["median"],
            over["megaopt, replicated"]["median"],
            found["goal"],
        ]
        numbers += [100 * found["exchange_share"], found["pairs"]]
        yield "docs/layer-wise.md", f'{dtype}, `"{precision}"`', 0, numbers
    fsdp = _result("fsdp")
    for label, name in (
        ("`muon-fsdp2`", "muon-fsdp2"),
        ("`torch.optim.Muon` on DTensors", "torch.optim.Muon"),
    ):
        told = [fsdp["seconds"][name], fsdp["over_megaopt"][name]["median"], None, None]
        yield "docs/fsdp.md", label, 0, told
    yield "docs/fsdp.md", "megaopt, `fsdp`", 0, [fsdp["seconds"]["megaopt, fsdp"], None, None, None]


def _other_claims() -> Iterator[Claim]:
    clips = [_result(f"clip_{threads}_threads")["cases"] for threads in (1, 2)]
    for label, case, ours in (
        ("nothing is clipped", "nothing is clipped", "ours"),
        ("clipped, with a pass over the gradients", "clipped", "ours, a pass"),
        ("clipped, the factor left to the step", "clipped", "ours, left to the step"),
        ("the same with the AdamW step", "clipped, with the AdamW step", "ours"),
    ):
        told: list[float | None] = [each[case]["times_faster_than_torch"][ours]["median"] for each in clips]
        yield "docs/stepping.md", label, 0, told
    slower = [
        _result(name)["times_slower_than_megaopt"] for name in ("soap_every_step", "soap_every_step_kl")
    ]
    medians = [each["emerging-optimizers"]["median"] for each in slower]
    yield "docs/soap.md", "every step", 0, [None, *medians]


def _rate_claims() -> Iterator[Claim]:
    """Held-out losses of each row, seed by seed, and their mean."""
    rows: dict[str, tuple[float, list[float]]] = {}
    for prefix, training in (("", "gpt"), ("vit, ", "vit"), ("convnet, ", "convnet")):
        found = _result("suggested_rate")["trainings"][training]
        best = found["adamw_best"]
        for rate, losses in found["adamw"].items():
            chosen = " (best)" if float(rate) == best else ""
            rows[f"{prefix}AdamW, {rate}{chosen}"] = (float(rate), losses)
        rows[f"{prefix}Muon at AdamW's rate"] = (best, found["muon_at_adamw_rate"])
        rows[f"{prefix}Muon as suggested"] = (found["suggested"]["lr"], found["muon_suggested"])
        for multiple, losses in found.get("other_multiples", {}).items():
            rows[f"{multiple} times"] = (float(multiple) * best, losses)
    for label, (rate, losses) in rows.items():
        mean = sum(losses) / len(losses)
        yield "docs/muon-learning-rate.md", label, 0, [rate, *losses, mean]


CLAIMS = [*_gpu_claims(), *_muon_and_lion_claims(), *_rank_claims(), *_other_claims(), *_rate_claims()]


@pytest.mark.parametrize(
    ("page", "label", "number", "measured"),
    CLAIMS,
    ids=[f"{each[0]}: {each[1]} {each[2]}" for each in CLAIMS],
)
def test_a_row_of_a_page_shows_what_was_measured(
    page: str, label: str, number: int, measured: list[float | None]
) -> None:
    """To the digits that the page shows."""
    for cell, value in zip(_row(page, label, number), measured, strict=False):
        if value is None:
            continue
        shown = NUMBER.search(cell)
        assert shown, f"no number in {cell!r}"
        digits = len(shown[0].partition(".")[2])
        assert abs(float(shown[0].replace(",", "")) - value) <= 0.5001 * 10**-digits, (cell, value)


def test_the_page_of_measurements_has_a_row_for_every_file_of_results() -> None:
    """With the processor and torch that the file tells, and a commit: `python benchmarks/measurements.py` writes it."""
    text = (ROOT / "docs" / "measurements.md").read_text()
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    expected = _measurements().rows()
    assert [row[:-1] for row in shown] == [row[:-1] for row in expected]
    for row, (*_, noted) in zip(shown, expected, strict=True):
        assert re.fullmatch(r"[0-9a-f]{8}(-dirty)?", row[-1]), row
        assert noted in ("", row[-1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_with_measured_numbers_says_where_they_come_from(page: Path) -> None:
    """It names a script of benchmarks/ that exists, and leads to the page with processors and commits."""
    text = page.read_text()
    named = set(re.findall(r"benchmarks/(\w+\.py)", text))
    assert {name for name in named if not (BENCHMARKS / name).is_file()} == set()
    if named and page.stem not in GENERATED:
        assert re.search(r"\{doc\}`measurements`|measurements\.md", text)


DENIALS = {
    "muon": r"(?i)\ball (the )?numbers\b[^.]*\bCPUs?\b|everything that the numbers[^.]*\bCPUs?\b|"
    r"no(thing| number) [^.]*measured on (a )?GPUs?|not (yet )?(been )?run on a GPU",
    "soap": r"(?i)SOAP[^.]*not been measured on a GPU",
}
"""Suite of the results of GPUs to the sentences that contradict it."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_denies_what_was_measured_on_a_gpu(page: Path) -> None:
    """A sentence such as "all numbers were measured on CPUs" is wrong once there is a result of a GPU."""
    measured = {
        suite for path in BENCHMARKS.glob("results/gpu_*.json") for suite in json.loads(path.read_text())
    }
    assert "muon" in measured
    text = " ".join(page.read_text().split())
    denied = [found[0] for suite in measured & set(DENIALS) for found in re.finditer(DENIALS[suite], text)]
    assert denied == []
