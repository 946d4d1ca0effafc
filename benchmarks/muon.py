"""Time one step of Muon against other packages', in turns, one thread.

    python benchmarks/muon.py                        # every suite
    python benchmarks/muon.py square_768 --rounds 9  # one

Peers that are not installed are left out and named. Every round has new random gradients, the same for all packages:
with those of the round before, kernels would be found compiled that training compiles in every step. They are Gaussian,
and in the suite `gpt2_concentrated` of a spectrum that falls with a power of 3/4, as those of real networks do: what
shortcut is allowed depends on it. No round is dropped. Ratios are medians over rounds, with an interval that holds the
median of repetitions in 95 of 100 cases.

Results of each kind of processor have files of their own: `amx_bf16`, `avx512_bf16` or `neither` tells what it
multiplies bfloat16 with.

On a processor that cannot multiply bfloat16, megaopt computes precision medium in float32, its peers in bfloat16;
`--bfloat16` has it do as they do. Where MKL is installed, as by `megaopt-muon[mkl]`, results have files of their own.
"""

import argparse
import importlib
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from harness import interleave, median_interval, ratio, summary, write_result
from megaopt_muon.choice.rates import processor_kind
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.products import precision as muon_precision
from megaopt_muon.products.mkl import has_triangles

WIDTH = 768
GPT2 = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
LLAMA = [(512, 4096), (128, 4096), (128, 4096), (4096, 512), (1792, 4096), (1792, 4096), (4096, 1792)]
SMALL = [(384, 128), (128, 128), (512, 128), (128, 512)]
LLAMA_1024 = [(1024, 1024), (256, 1024), (256, 1024), (1024, 1024), (2816, 1024), (2816, 1024), (1024, 2816)]
MANY = [(64, 64), (128, 64), (128, 128), (256, 128), (256, 256), (512, 128)] * 21
MANY_DISTINCT = [
    (64 + 36 * (index % 12) + index // 12, 72 + 40 * (index // 12) + index % 12) for index in range(126)
]
SUITES = {
    "gpt2": (GPT2, 15),
    "gpt2_concentrated": (GPT2, 15),
    "llama": (LLAMA, 15),
    "llama_1024": (LLAMA_1024, 15),
    "wide_512": ([(512, 4096)], 15),
    "square_768": ([(WIDTH, WIDTH)], 15),
    "square_2048": ([(2048, 2048)], 15),
    "small": (SMALL * 4, 25),
    "many": (MANY, 15),
    "many_distinct": (MANY_DISTINCT, 15),
}
"""One block of GPT-2 124M; one of Llama 8B on one of eight tensor-parallel ranks; one of a Llama of width 1024; a wide
matrix; squares; a demo model; 126 small matrices in six shapes, and in 126."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

PRECISIONS = ("medium", "highest")

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1


def parameters(shapes: list[tuple[int, int]]) -> list[torch.nn.Parameter]:
    """Return parameters, the same for every package."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes]


class Gradients:
    """New random gradients in every round, of the suite's spectrum and of a new norm."""

    def __init__(self, shapes: list[tuple[int, int]], *, concentrated: bool) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.shapes = shapes
        self.bases = [self.singular_vectors(*shape) for shape in shapes] if concentrated else None
        self.current: list[torch.Tensor] = []

    def singular_vectors(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random ones, times singular values that fall with a power of 3/4."""
        size = min(rows, columns)
        left = torch.linalg.qr(torch.randn(rows, size, generator=self.generator))[0]
        right = torch.linalg.qr(torch.randn(columns, size, generator=self.generator))[0]
        return left * torch.arange(1, size + 1) ** -0.75, right.mT

    def renew(self) -> None:
        """Draw those of the next round."""
        if self.bases is None:
            self.current = [torch.randn(shape, generator=self.generator) for shape in self.shapes]
        else:  # the singular vectors stay, in another order and with other signs
            self.current = [
                left[torch.randperm(len(left), generator=self.generator)] @ right
                + 1e-3 * torch.randn(shape, generator=self.generator) / shape[0]
                for (left, right), shape in zip(self.bases, self.shapes, strict=True)
            ]
        size = float(torch.rand((), generator=self.generator)) + 0.5
        self.current = [gradient * size for gradient in self.current]


def ours(params: list[torch.nn.Parameter], precision: str) -> torch.optim.Optimizer:
    """Return Muon of megaopt."""
    return TensorParallelMuon(params, LR, MOMENTUM, True, DECAY, fp32_matmul_prec=precision)


def emerging(params: list[torch.nn.Parameter], precision: str) -> torch.optim.Optimizer:
    """Return Muon of emerging-optimizers."""
    module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    return module.Muon(params, LR, MOMENTUM, DECAY, nesterov=True, fp32_matmul_prec=precision)


def torch_muon(params: list[torch.nn.Parameter], precision: str) -> torch.optim.Optimizer | None:
    """Return Muon of torch, which computes in bfloat16."""
    return torch.optim.Muon(params, LR, DECAY, MOMENTUM) if precision == "medium" else None


def pytorch_optimizer(
    params: list[torch.nn.Parameter], precision: str, **kwargs: Any
) -> torch.optim.Optimizer | None:
    """Return Muon of pytorch_optimizer, which computes in bfloat16."""
    module = importlib.import_module("pytorch_optimizer")
    group = {"params": params, "use_muon": True}
    return module.Muon([group], LR, MOMENTUM, DECAY, **kwargs) if precision == "medium" else None


def pytorch_optimizer_gram(params: list[torch.nn.Parameter], precision: str) -> torch.optim.Optimizer | None:
    """Return Muon of pytorch_optimizer with its iteration on Gram matrices."""
    return pytorch_optimizer(params, precision, ns_method="gram_newton_schulz")


def heavyball(params: list[torch.nn.Parameter], precision: str) -> torch.optim.Optimizer | None:
    """Return Muon of heavyball, which computes in bfloat16."""
    module = importlib.import_module("heavyball")
    return (
        module.Muon(params, lr=LR, betas=(MOMENTUM, 0.99), weight_decay=DECAY)
        if precision == "medium"
        else None
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer | None]] = {
    "megaopt": ours,
    "emerging-optimizers": emerging,
    "torch": torch_muon,
    "pytorch_optimizer": pytorch_optimizer,
    "pytorch_optimizer_gram": pytorch_optimizer_gram,
    "heavyball": heavyball,
}


# pytorch_optimizer's Gram iteration computes in float16, which takes a CPU a hundred times as long.
PEERS = [name for name in OPTIMIZERS if name not in {"megaopt", "pytorch_optimizer_gram"}]


def speedups(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return how many times longer than megaopt each other package takes, round by round."""
    return {
        name: {**ratio(times, name, "megaopt"), **median_interval(times, name, "megaopt")}
        for name in times
        if name != "megaopt"
    }


def candidates(
    suite: str, precision: str, names: list[str], skipped: dict[str, str], gradients: Gradients
) -> dict[str, Callable[[], Any]]:
    """Return a step of every package that is there and computes in this precision."""
    steps = {}
    for name in names:
        params = parameters(SUITES[suite][0])
        for param, gradient in zip(params, gradients.current, strict=True):
            param.grad = gradient.clone()
        try:
            optimizer = OPTIMIZERS[name](params, precision)
            if optimizer is None:
                continue
            optimizer.step()
        except Exception as error:  # noqa: BLE001 - a peer that does not run here is reported, not fatal
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                :200
            ]
            continue

        def prepare(params=params) -> None:
            for param, gradient in zip(params, gradients.current, strict=True):
                param.grad = gradient.clone()  # some packages drop gradients after a step, or write into them

        def step(optimizer=optimizer) -> None:
            optimizer.step()

        step.prepare, step.optimizer = prepare, optimizer

        steps[name] = step
    return steps


def large_product() -> float:
    """Return the operations in a second of a large product in bfloat16: what a step of products alone would reach."""
    x = torch.randn(2048, 2048).bfloat16()
    out, best = torch.empty_like(x), float("inf")
    for _ in range(8):
        start = time.process_time()
        torch.mm(x, x, out=out)
        best = min(best, time.process_time() - start)
    return 2.0 * 2048**3 / best


def operations(shapes: list[tuple[int, int]], plan: str) -> float:
    """Return the operations of all products of a step, where symmetric ones count whole."""
    runs = {shape for shape, _, name in (item.partition(":") for item in plan.split()) if name == "gram"}
    total = 0.0
    for small, large in (sorted(shape) for shape in shapes):
        lengths = (3, 2) if f"{small}x{large}" in runs else (1,) * 5
        squares = sum(4 * length - 3 for length in lengths)
        total += 2.0 * small**2 * (2 * len(lengths) * large + squares * small)
    return total


def installed(package: str) -> str | None:
    """Return a distribution's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=list(SUITES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of one thread, on a machine that others use"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, help="measure one only, into a file of its own")
    parser.add_argument(
        "--bfloat16", action="store_true", help="compute medium in bfloat16 wherever, and medium only"
    )
    parser.add_argument("--peers", nargs="*", default=PEERS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    precisions = [arguments.precision] if arguments.precision else PRECISIONS
    if arguments.bfloat16:
        if arguments.precision == "highest":
            parser.error("--bfloat16 is about precision medium")
        precisions = ["medium"]
        muon_precision.multiplies_bfloat16 = lambda: True
    kind = processor_kind()
    with_mkl = has_triangles(4096, torch.float32, torch.device("cpu"))
    packages = (
        "emerging-optimizers",
        "pytorch_optimizer",
        "heavyball",
        "dion",
        *(["mkl"] if with_mkl else []),
    )
    setting = {
        "versions": {name: installed(name) for name in packages},
        "processor": kind,
        "clock": arguments.clock,
        "medium_computes_in": str(muon_precision.compute_dtype("medium", torch.float32, torch.device("cpu"))),
    }
    threads = arguments.threads > 1 and f"{arguments.threads}_threads"
    kinds = (arguments.precision, arguments.bfloat16 and "bfloat16", with_mkl and "mkl", threads, kind)
    for suite in arguments.suites:
        result: dict[str, Any] = {"shapes": SUITES[suite][0], **setting}
        for precision in precisions:
            skipped: dict[str, str] = {}
            gradients = Gradients(SUITES[suite][0], concentrated="concentrated" in suite)
            gradients.renew()
            steps = candidates(suite, precision, ["megaopt", *arguments.peers], skipped, gradients)
            rounds = arguments.rounds or SUITES[suite][1]
            times = interleave(
                steps, rounds=rounds, warmup=1, renew=gradients.renew, clock=CLOCKS[arguments.clock]
            )
            slower = speedups(times)
            best = summary(times)
            least = min(speedup["median"] for speedup in slower.values())
            result[precision] = {
                "times": best,
                "times_slower_than_megaopt": slower,
                "best_peer_over_megaopt": least,
                "skipped": skipped,
            }
            plan = steps["megaopt"].optimizer.param_groups[0]["ns_plan"]
            if precision == "highest":
                result[precision]["products"] = {"ns_plan": plan}
            elif setting["medium_computes_in"] == "torch.bfloat16":
                rate = operations(SUITES[suite][0], plan) / (best["megaopt"]["median_ms"] * 1e-3)
                result[precision]["products"] = {
                    "ns_plan": plan,
                    "teraflops_of_the_step": round(rate * 1e-12, 3),
                    "teraflops_of_a_large_product": round(large_product() * 1e-12, 3),
                }
            print(f"{suite:18} {precision:8} best peer / megaopt {least:.2f}", end="  ")
            print(
                "  ".join(f"{name} {value['median']:.2f}" for name, value in slower.items()),
                skipped or "",
                flush=True,
            )
        write_result("_".join(filter(None, ("muon", suite, *kinds))), result)


if __name__ == "__main__":
    main()
