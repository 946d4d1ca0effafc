"""The comparisons of `gpu.py`, one function a suite."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import memory_table
import torch
from attrs import frozen
from harness import median_interval
from megaopt_muon.muon import TensorParallelMuon

from megaopt_core import build_optimizer

__all__ = ["SUITES", "Bench"]

GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
LLAMA_8B = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]
MOE = [(2048, 1408), (1408, 2048)] * 64
SMALL = [(64, 64), (128, 64), (128, 128), (256, 128), (256, 256), (512, 128)] * 21
"""Blocks of GPT-2 124M, one block of Llama 8B, 64 experts of 2048 x 1408, and 126 small matrices."""

BF16_PEAK = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 products a second, as the makers give them; the first name that a device's holds."""

LR, MOMENTUM, DECAY, NS_STEPS = 0.02, 0.95, 0.1, 5

type Shapes = Sequence[tuple[int, ...]]


@frozen
class Bench:
    """Where and how often is measured.

    Args:
        device: where.
        rounds: how often each candidate is timed.
        shrink: by what the sides of matrices are divided, to try the script.
    """

    device: torch.device
    rounds: int
    shrink: int = 1

    @property
    def is_cuda(self) -> bool:
        """Whether there are events, streams and counts of memory."""
        return self.device.type == "cuda"

    def params(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        """Return parameters with gradients.

        Args:
            shapes: one a parameter.
            dtype: of both.
        """
        chance = torch.Generator(self.device).manual_seed(0)
        made = []
        for shape in shapes:
            small = [max(1, side // self.shrink) for side in shape]
            param = torch.nn.Parameter(
                torch.randn(small, generator=chance, device=self.device).to(dtype) * 0.02
            )
            param.grad = torch.randn(small, generator=chance, device=self.device).to(dtype) * 1e-3
            made.append(param)
        return made

    def copies(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return parameters like a model's, with gradients of their own.

        Args:
            model: every parameter of it has a gradient.
        """
        made = []
        for param in model.parameters():
            assert param.grad is not None
            copy = torch.nn.Parameter(param.detach().clone())
            copy.grad = param.grad.clone()
            made.append(copy)
        return made

    def model(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """Return a model of linear layers of these shapes, with gradients."""
        layers = []
        for param in self.params(shapes, dtype):
            layer = torch.nn.Linear(1, 1, bias=False, device="meta")
            layer.weight = param
            layer.out_features, layer.in_features = param.shape
            layers.append(layer)
        # A layer behind them, so that the last matrix is not read as an output head.
        norm = torch.nn.LayerNorm(8, device=self.device, dtype=dtype)
        for param in norm.parameters():  # a graph steps all parameters or none
            param.grad = torch.full_like(param, 1e-3)
        return torch.nn.Sequential(*layers, norm)

    def occupy(self) -> None:
        """Give the device work for some milliseconds, as a backward pass does."""
        if self.is_cuda:
            for _ in range(5):
                torch.mm(self.filler, self.filler)

    @cached_property
    def filler(self) -> torch.Tensor:
        """A matrix whose square takes an H100 more than a millisecond."""
        return torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)

    def once(self, action: Callable[[], Any], *, behind: bool = False) -> float:
        """Return the seconds that an action takes on the device.

        Args:
            action: what is timed.
            behind: launch it while the device has other work, as a step's does behind a backward pass: what the host
                does meanwhile is not timed.
        """
        if not self.is_cuda:
            start = time.perf_counter()
            action()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if behind:
            self.occupy()
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def times(
        self, candidates: Mapping[str, Callable[[], Any]], *, behind: bool = False
    ) -> dict[str, list[float]]:
        """Return the seconds of each candidate, in turns.

        Args:
            candidates: name to what is timed.
            behind: while the device has other work.
        """
        found: dict[str, list[float]] = {name: [] for name in candidates}
        for turn in range(-5, self.rounds):
            for name, action in candidates.items():
                seconds = self.once(action, behind=behind)
                if turn >= 0:
                    found[name].append(seconds)
        return found


def compared(
    times: Mapping[str, Sequence[float]], ours: str, goals: Mapping[str, float], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """Return medians, and how many times as fast as each other candidate ours is, with the interval of that median.

    Args:
        times: seconds by candidate.
        ours: its name.
        goals: other's name, or "" for every other, to the least ratio that is asked for.
        skipped: candidates that do not run here, and why.
    """
    ratios = {
        name: statistics.median(b / a for a, b in zip(times[ours], values, strict=True))
        for name, values in times.items()
        if name != ours
    }
    missed = {
        name: {"ratio": round(value, 4), "goal": goals.get(name, goals.get("", 0.0))}
        for name, value in ratios.items()
        if value < goals.get(name, goals.get("", 0.0))
    }
    return {
        "median_ms": {name: round(1e3 * statistics.median(values), 4) for name, values in times.items()},
        "speedup_over": {name: round(value, 4) for name, value in ratios.items()},
        "interval_95": {
            name: [round(end, 4) for end in median_interval(times, name, ours).values()] for name in ratios
        },
        "missed": missed,
        "skipped": dict(skipped),
    }


def both_ways(
    bench: Bench,
    candidates: Mapping[str, Callable[[], Any]],
    ours: str,
    goals: Mapping[str, float],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Compare steps behind other work of the device, as they are after a backward pass, and on one that waits for them.

    Goals are those of the first; the second is the host's time where calls take longer than what they launch.

    Args:
        bench: where.
        candidates: name to what is timed.
        ours: name of ours.
        goals: as of :func:`compared`.
        skipped: likewise.
    """
    behind = compared(bench.times(candidates, behind=True), ours, goals, skipped)
    return {**behind, "on_an_idle_device": compared(bench.times(candidates), ours, {}, {})}


def adamw(bench: Bench) -> dict[str, Any]:
    """AdamW on GPT-2's matrices against torch's fused one: at least 0.98 of its speed; without a read of the norm."""
    model = bench.model(GPT2)
    ours = build_optimizer(model, "adamw", lr=1e-3, clip_grad=0.0, overrides={})
    theirs = torch.optim.AdamW(bench.copies(model), lr=1e-3, fused=True)
    return both_ways(bench, {"megaopt": ours.step, "torch": theirs.step}, "megaopt", {"torch": 0.98}, {})


def _peers() -> dict[str, Callable[[list[torch.nn.Parameter]], Any]]:
    def emerging(params: list[torch.nn.Parameter]) -> Any:
        module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
        return module.Muon(params, LR, MOMENTUM, DECAY, nesterov=True, fp32_matmul_prec="medium")

    def gram(params: list[torch.nn.Parameter]) -> Any:
        module = importlib.import_module("gram_newton_schulz")
        return module.Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

    return {
        "emerging-optimizers": emerging,
        "torch": lambda params: torch.optim.Muon(params, LR, DECAY, MOMENTUM),
        "gram-newton-schulz": gram,
    }


def _flops(shapes: Shapes, shrink: int) -> float:
    """Return the products and sums of the plain iteration: what a plan saves counts for it."""
    total = 0.0
    for rows, columns in ([side // shrink for side in shape] for shape in shapes):
        least, most = min(rows, columns), max(rows, columns)
        total += NS_STEPS * (4.0 * least**2 * most + 2.0 * least**3)
    return total


def muon(bench: Bench) -> dict[str, Any]:
    """Muon in bf16 on three models' shapes against others, and its share of the chip's bf16 peak: goal 60 %."""
    found = {}
    device = torch.cuda.get_device_name() if bench.is_cuda else ""
    peak = next((value for name, value in BF16_PEAK.items() if name in device), None)
    for suite, shapes in {"gpt2": GPT2, "llama_8b": LLAMA_8B, "moe": MOE}.items():
        ours = TensorParallelMuon(bench.params(shapes), LR, MOMENTUM, True, DECAY, fp32_matmul_prec="medium")
        candidates, skipped = {"megaopt": ours.step}, {}
        for name, make in _peers().items():
            try:
                peer = make(bench.params(shapes))
                peer.step()
                candidates[name] = peer.step
            except Exception as error:  # noqa: BLE001 - a peer that does not run here is reported
                skipped[name] = f"{type(error).__name__}: {error}"[:200]
        found[suite] = both_ways(bench, candidates, "megaopt", {"": 1.0}, skipped)
        if peak is not None:
            seconds = found[suite]["median_ms"]["megaopt"] * 1e-3
            share = _flops(shapes, bench.shrink) / seconds / peak
            found[suite]["share_of_bf16_peak"] = {"found": round(share, 4), "goal": 0.6}
    return found


def small_matrices(bench: Bench) -> dict[str, Any]:
    """126 small matrices in one step against a loop of steps of one matrix each: at least 8 times as fast."""
    together = TensorParallelMuon(bench.params(SMALL), LR, MOMENTUM, True, DECAY, fp32_matmul_prec="medium")
    alone = [
        TensorParallelMuon([param], LR, MOMENTUM, True, DECAY, fp32_matmul_prec="medium")
        for param in bench.params(SMALL)
    ]
    times = bench.times({"megaopt": together.step, "loop": lambda: [each.step() for each in alone]})
    return compared(times, "megaopt", {"loop": 8.0}, {})


def clip(bench: Bench) -> dict[str, Any]:
    """A clipped step of AdamW against `clip_grad_norm_` and torch's fused step."""
    model = bench.model(GPT2)
    ours = build_optimizer(model, "adamw", lr=1e-3, clip_grad=1e-3, overrides={})
    params = bench.copies(model)
    theirs = torch.optim.AdamW(params, lr=1e-3, fused=True)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1e-3, foreach=True)
        theirs.step()

    return both_ways(bench, {"megaopt": ours.step, "torch": clipped}, "megaopt", {"torch": 0.98}, {})


def mixed_precision(bench: Bench) -> dict[str, Any]:
    """bf16 with main parameters, with remainders, and with states in 8 bits, against AdamW in fp32."""
    aware = {"bf16": True, "use_precision_aware_optimizer": True}
    kinds: dict[str, dict[str, Any]] = {
        "main": {"bf16": True},
        "remainders": aware,
        "8 bits": {**aware, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    }
    candidates = {"fp32": build_optimizer(bench.model(GPT2), "adamw", lr=1e-3, overrides={}).step}
    for name, settings in kinds.items():
        model = bench.model(GPT2, torch.bfloat16)
        candidates[name] = build_optimizer(model, "adamw", lr=1e-3, overrides={}, **settings).step
    return compared(bench.times(candidates), "main", {}, {})


def offload(bench: Bench) -> dict[str, Any]:
    """All and half of AdamW's and Muon's states on the CPU, with overlap and without: overlap is to gain at both."""
    found = {}
    for name in ("adamw", "muon"):
        candidates = {"in place": build_optimizer(bench.model(GPT2), name, lr=1e-3, overrides={}).step}
        for fraction in (0.5, 1.0):
            for overlap in (False, True):
                settings = {"optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
                made = build_optimizer(
                    bench.model(GPT2), name, lr=1e-3, overrides={}, optimizer_cpu_offload=True, **settings
                )
                candidates[f"{fraction:.0%}{', overlap' if overlap else ''}"] = made.step
        times = bench.times(candidates)
        found[name] = {
            "to_in_place": compared(times, "in place", {}, {}),
            "overlap_gains": {share: _gain(times, share) for share in ("50%", "100%")},
        }
    return found


def _gain(times: Mapping[str, Sequence[float]], share: str) -> dict[str, Any]:
    """Return how many times as fast a step with overlap is; it is to gain."""
    without, overlapped = times[share], times[f"{share}, overlap"]
    gain = statistics.median(a / b for a, b in zip(without, overlapped, strict=True))
    return {"found": round(gain, 4), "goal": "above 1", "missed": gain <= 1.0}


def graphs(bench: Bench) -> dict[str, Any]:
    """A replayed step against the eager one, clipped and stored in less, too; tests/gpu compares their bits."""
    found = {}
    no_skip = {"bf16": True, "skip_nonfinite_steps": False}
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {"clip_grad": 0.0},
        "fp32, clipped": {"clip_grad": 1e-3},
        "main parameters, no rule that skips": no_skip,
        "remainders, no rule that skips": {**no_skip, "use_precision_aware_optimizer": True},
    }
    for name in ("adamw", "lion", "muon"):
        for kind, settings in kinds.items():
            dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
            given = {"lr": 1e-3, "overrides": {}, **settings}
            eager = build_optimizer(bench.model(GPT2, dtype), name, **given)
            replayed = build_optimizer(bench.model(GPT2, dtype), name, **given, optimizer_cuda_graph=True)
            steps = {"graph": replayed.step, "eager": eager.step}
            measured = both_ways(bench, steps, "graph", {"eager": 1.0}, {})
            reasons = [part.runner.why_not for part in replayed.parts]  # type: ignore[attr-defined]
            found[f"{name}, {kind}"] = {**measured, "why_not": reasons}
            del eager, replayed, steps
            gc.collect()
    return found


def memory(bench: Bench) -> dict[str, Any]:
    """Bytes a parameter on the GPU, between steps and at the peak of one, against the table of `docs/memory.md`.

    Gradients are not counted. What is kept may be 5 % above the table, which knows nothing of the memory that Muon
    works in and keeps too.
    """
    if not bench.is_cuda:
        return {"skipped": "only CUDA counts what is allocated"}
    found = {}
    for optimizer in ("adam", "muon"):
        for precision in memory_table.PRECISIONS:
            for place, extra in memory_table.PLACES.items():
                settings = memory_table.settings_of(optimizer, precision) | extra
                kept, peak = _bytes_a_parameter(bench, optimizer, settings)
                documented = memory_table.documented(optimizer, precision, place)
                found[f"{optimizer}, {precision}, {place}"] = {
                    "kept": round(kept, 3),
                    "peak": round(peak, 3),
                    "documented": documented,
                    "missed": kept > 1.05 * documented,
                }
    return found


def _bytes_a_parameter(bench: Bench, optimizer: str, settings: Mapping[str, Any]) -> tuple[float, float]:
    gc.collect()
    torch.cuda.synchronize()
    before = _asked_for()
    model = bench.model(GPT2, torch.bfloat16 if settings.get("bf16") else torch.float32)
    for layer in model:  # type: ignore[attr-defined] # a Sequential
        layer.weight.use_muon = layer.weight.dim() > 1
    made = build_optimizer(model, optimizer, lr=1e-3, overrides={}, **settings)
    made.step()
    torch.cuda.synchronize()
    grads = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    count = sum(param.numel() for param in model.parameters())
    kept = _asked_for() - before - grads
    torch.cuda.reset_peak_memory_stats()
    made.step()
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return kept / count, (peak - before - grads) / count


def _asked_for() -> int:
    """Return the bytes that tensors were asked for with: blocks of the allocator are up to 1 MB larger."""
    asked: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return asked


SUITES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "adamw": adamw,
    "muon": muon,
    "small_matrices": small_matrices,
    "clip": clip,
    "mixed_precision": mixed_precision,
    "offload": offload,
    "graphs": graphs,
    "memory": memory,
}
"""Name to suite."""
