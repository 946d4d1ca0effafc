"""What the benchmarks share: alternating measurements, ratios of them, and results as JSON."""

import json
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "RESULTS",
    "commit",
    "gpt2_parameters",
    "interleave",
    "median_interval",
    "parameters_of",
    "processor",
    "quartiles",
    "ratio",
    "summary",
    "write_result",
]

RESULTS = Path(__file__).parent / "results"

WIDTH, DEPTH, VOCABULARY, CONTEXT = 768, 12, 50257, 1024


def gpt2_parameters() -> list[torch.nn.Parameter]:
    """Return the 148 parameters of GPT-2 with 124 million elements, each with a gradient."""
    block = [
        (WIDTH,),
        (WIDTH,),
        (3 * WIDTH, WIDTH),
        (3 * WIDTH,),
        (WIDTH, WIDTH),
        (WIDTH,),
        (WIDTH,),
        (WIDTH,),
        (4 * WIDTH, WIDTH),
        (4 * WIDTH,),
        (WIDTH, 4 * WIDTH),
        (WIDTH,),
    ]
    shapes = [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), *block * DEPTH, (WIDTH,), (WIDTH,)]
    return parameters_of(shapes)


def parameters_of(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    """Return parameters with small random values and gradients.

    Args:
        shapes: one a parameter.
    """
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        param.grad = torch.randn(shape, generator=generator) * 1e-3
        params.append(param)
    return params


def interleave(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    renew: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Time candidates in turns, in an order that is shuffled anew in every round.

    What else the machine does then hits all of them alike, so that ratios within a round mean something where the
    times themselves do not; and none always runs on the caches that the same other one left.

    Args:
        candidates: name to what is timed.
        rounds: how often each is timed.
        warmup: rounds before, which are not timed.
        renew: makes the inputs of a round, before it and not timed; a candidate's attribute `prepare`, if it has one,
            then takes them before it is timed.
        clock: tells the time in seconds. Where others use the machine, `time.process_time` tells what one thread
            computes without what it waits.
        seed: of the order of candidates.

    Returns:
        Name to seconds, one a round.
    """
    names = list(candidates)
    order = random.Random(seed)  # noqa: S311 - nothing secret
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-warmup, rounds):
        if renew is not None:
            renew()
        for name in order.sample(names, len(names)):
            getattr(candidates[name], "prepare", lambda: None)()
            start = clock()
            candidates[name]()
            elapsed = clock() - start
            if round_number >= 0:
                times[name].append(elapsed)
    return times


def ratio(times: Mapping[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Return median and quartiles of the ratio of two candidates' times, round by round.

    Args:
        times: what :func:`interleave` returned.
        above: numerator.
        below: denominator.
    """
    return quartiles([a / b for a, b in zip(times[above], times[below], strict=True)])


def median_interval(times: Mapping[str, Sequence[float]], above: str, below: str) -> dict[str, float]:
    """Return an interval that holds the median of the ratio of two candidates' times with 95 percent.

    Its ends are order statistics: nothing is assumed of how times are spread.

    Args:
        times: what :func:`interleave` returned.
        above: numerator.
        below: denominator.
    """
    ratios = sorted(a / b for a, b in zip(times[above], times[below], strict=True))
    count = len(ratios)
    # The median lies below the k-th smallest with the probability that at most k - 1 of count fair coins show heads.
    outside, rank = 0.0, 0
    while rank < (count - 1) // 2 and outside + math.comb(count, rank) / 2**count <= 0.025:
        outside += math.comb(count, rank) / 2**count
        rank += 1
    rank = max(rank - 1, 0)
    return {"low95": round(ratios[rank], 5), "high95": round(ratios[count - 1 - rank], 5)}


def quartiles(values: list[float]) -> dict[str, float]:
    """Return median and quartiles.

    Args:
        values: at least two numbers.
    """
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 5), "q25": round(low, 5), "q75": round(high, 5)}


def summary(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median and best time of every candidate in milliseconds.

    Args:
        times: what :func:`interleave` returned.
    """
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(values), 4),
            "best_ms": round(1e3 * min(values), 4),
            "rounds": len(values),
        }
        for name, values in times.items()
    }


def processor() -> str:
    """Return the processor's name, and which of its instructions matter to products in bfloat16."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in told.get("flags", "").split()]
    return ", ".join([told.get("model name") or platform.processor() or platform.machine(), *flags])


def commit() -> str:
    """Return the commit that is measured, marked where files differ from it; empty outside of a repository."""
    asked = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty"]
    return subprocess.run(
        asked, cwd=RESULTS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write a result with what it was measured on, and return the file.

    Args:
        name: of the benchmark.
        result: what it found.
    """
    environment = {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in ("megaopt-core", "megaopt-adam")},
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment, **result}, indent=2) + "\n")
    return path
