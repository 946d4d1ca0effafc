"""Compare the error of every way to compute Newton-Schulz with the plain iteration's, over many spectra.

    python benchmarks/muon_accuracy.py

Errors are relative, in the Frobenius norm, against the same iteration in float64. `plain` is the formula, one product
after the other, in bfloat16 under medium and in float32 under highest; the others are given as multiples of its error.
"""

import importlib.util
import statistics
from pathlib import Path
from typing import Any

import torch
from harness import write_result
from megaopt_muon.coefficients import get_supported_coefficient_types, resolve_coefficients
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.products import precision as muon_precision

SHAPES = [(96, 96), (192, 48), (64, 256), (320, 480)]
SPECTRA = [
    "flat", "linear", "geometric:0.3", "geometric:1", "geometric:2", "geometric:4", "geometric:6", "power:0.25",
    "power:0.5", "power:0.75", "power:1", "power:2", "rank:1", "rank:8", "half", "two", "spike:2", "spike:3", "spike:6",
    "spike:10", "spike:40", "huge", "tiny",
]  # fmt: skip
MODES = {
    "highest": ("highest", torch.float32, ("auto", "standard")),
    "medium in bfloat16": ("medium", torch.bfloat16, ("auto", "standard", "gram")),
    "medium in float32": ("medium", torch.bfloat16, ("auto", "gram")),
}
"""Precision, dtype of `plain`, and methods; the processor may multiply bfloat16 or not."""


def formulas() -> Any:
    """Return the formulas that the tests compare with."""
    path = Path(__file__).parents[1] / "plugins/megaopt-muon/tests/conftest.py"
    spec = importlib.util.spec_from_file_location("muon_formulas", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Measure, print the worst and the median, and write JSON."""
    torch.set_num_threads(1)
    given = formulas()
    table: dict[str, Any] = {}
    for mode, (precision, dtype, methods) in MODES.items():
        muon_precision.multiplies_bfloat16 = lambda mode=mode: mode == "medium in bfloat16"
        for name in get_supported_coefficient_types():
            if name == "custom":
                continue
            coefficients = resolve_coefficients(name, 5)
            rows: dict[str, dict[str, float]] = {}
            for shape in SHAPES:
                for kind in SPECTRA:
                    update = given.with_singular_values(given.spectrum(kind, min(shape)), *shape)
                    exact = given.newton_schulz64(update, coefficients)
                    plain = given.error(given.newton_schulz_plain(update, coefficients, dtype), exact)
                    row = {"plain": float(f"{plain:.3e}")}
                    for method in methods:
                        got = given.error(NewtonSchulz(coefficients, precision, method)(update), exact)
                        row[method] = round(got / plain, 3)
                    rows[f"{kind} {shape[0]}x{shape[1]}"] = row
            found = {
                method: {
                    "worst": max(row[method] for row in rows.values()),
                    "median": round(statistics.median(row[method] for row in rows.values()), 3),
                }
                for method in methods
            }
            print(mode, name, found, flush=True)
            table.setdefault(mode, {})[name] = {"summary": found, "cases": rows}
    write_result("muon_accuracy", {"steps": 5, "errors": table})


if __name__ == "__main__":
    main()
