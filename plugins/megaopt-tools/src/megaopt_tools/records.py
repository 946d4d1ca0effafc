"""`run.json` and `compare.json`: everything about runs, for programs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import asdict

from megaopt_core import get_registry
from megaopt_tools.training import RunResult

__all__ = ["comparison_record", "run_record", "versions", "write_json"]


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and everything that plugs into megaopt."""
    found = {"python": platform.python_version(), "torch": version("torch")}
    for info in get_registry().plugins():
        if info.distribution is not None and info.version is not None:
            found[info.distribution] = info.version
    return found


def run_record(result: RunResult, threads: int) -> dict[str, Any]:
    """Return all that is to be known about a run, ready for JSON.

    Args:
        result: the run.
        threads: torch's.
    """
    recipe = result.recipe
    records = result.records
    return {
        "optimizer": recipe.optimizer,
        "lr": result.peak_lr,
        "val_bits_per_byte": result.val_bits_per_byte,
        "diverged_at": result.diverged_at,
        "steps": recipe.steps,
        "losses": [_number(record.loss) for record in records],
        "grad_norms": [_number(record.grad_norm) for record in records],
        "learning_rates": [_number(record.lr) for record in records],
        "milliseconds_per_step": {part: round(value, 3) for part, value in result.milliseconds.items()},
        "tokens_per_second": round(result.tokens_per_second, 1),
        "optimizers": _optimizers(result),
        "config": result.config.to_dict(),
        "schedule": {"style": recipe.schedule, "warmup": recipe.warmup},
        "seed": recipe.seed,
        "batch_size": recipe.batch_size,
        "context": recipe.context,
        "threads": threads,
        "ranks": result.ranks,
        "model": {**asdict(recipe.shape), "parameters": result.parameters},
        "text": text_record(result),
        "versions": versions(),
    }


def text_record(result: RunResult) -> dict[str, Any]:
    """Return what identifies the text of a run.

    Args:
        result: the run.
    """
    text = result.text
    return {
        "source": text.source,
        "sha256": text.sha256,
        "bytes": len(text.data),
        "train_bytes": text.train_bytes,
        "val_bytes": len(text.data) - text.train_bytes,
    }


def comparison_record(results: Sequence[RunResult], threads: int) -> dict[str, Any]:
    """Return all that is to be known about runs on the same text, ready for JSON.

    Args:
        results: the runs.
        threads: torch's.
    """
    ranked = sorted(results, key=lambda result: result.val_bits_per_byte or math.inf)
    return {
        "best": None if ranked[0].val_bits_per_byte is None else ranked[0].recipe.optimizer,
        "val_bits_per_byte": {result.recipe.optimizer: result.val_bits_per_byte for result in results},
        "runs": [run_record(result, threads) for result in results],
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record; the file is either the old or the whole new one.

    Args:
        path: the file.
        record: what to write.
    """
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _optimizers(result: RunResult) -> list[dict[str, Any]]:
    rows = []
    for part in result.report.parts:
        owner = get_registry().owner("optimizer", part.optimizer)
        rows.append(
            {
                "optimizer": part.optimizer,
                "class": part.optimizer_class,
                "distribution": owner.distribution,
                "version": owner.version,
                "parameters": part.parameters,
                "elements": part.elements,
                "changed_in_last_step": part.changed,
                "stepped": part.stepped,
            }
        )
    return rows


def _number(value: float | None) -> float | None:
    """Return a number that JSON can hold; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else value
