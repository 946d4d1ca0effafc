"""Time steps of SOAP on a 768 x 768 matrix against other packages', in turns, one thread.

    python benchmarks/soap.py                # every suite
    python benchmarks/soap.py every_step     # one

Every step has a gradient of its own. Where bases are refreshed every tenth step, what is timed is ten steps, of which
one refreshes; emerging-optimizers refreshes in every step, whatever it is compared with. Peers that are not installed
are left out and named.
"""

import argparse
import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from harness import interleave, ratio, summary, write_result
from megaopt_soap.soap import SOAP

SIZE, GRADIENTS = 768, 30
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "shampoo_beta": 0.95, "weight_decay": 0.01}

type Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def ours(frequency: int, *, kl: bool) -> Make:
    """Return what makes SOAP of megaopt."""
    return lambda params: SOAP(params, **SETTINGS, precondition_frequency=frequency, use_kl_shampoo=kl)


def emerging(*, kl: bool) -> Make:
    """Return what makes SOAP of emerging-optimizers, which refreshes in every step."""
    return lambda params: importlib.import_module("emerging_optimizers.soap").SOAP(
        params, **SETTINGS, use_kl_shampoo=kl
    )


def pytorch_optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SOAP of pytorch_optimizer, refreshed every tenth step."""
    return importlib.import_module("pytorch_optimizer").SOAP(params, **SETTINGS, precondition_frequency=10)


def heavyball(name: str) -> Make:
    """Return what makes a SOAP of heavyball, refreshed every tenth step."""
    return lambda params: getattr(importlib.import_module("heavyball"), name)(
        params, **SETTINGS, precondition_frequency=10
    )


SUITES: dict[str, tuple[int, dict[str, Make]]] = {
    "every_step": (1, {"megaopt": ours(1, kl=False), "emerging-optimizers": emerging(kl=False)}),
    "every_step_kl": (1, {"megaopt": ours(1, kl=True), "emerging-optimizers": emerging(kl=True)}),
    "every_tenth": (
        10,
        {
            "megaopt": ours(10, kl=False),
            "emerging-optimizers, every step": emerging(kl=False),
            "pytorch_optimizer": pytorch_optimizer,
            "heavyball": heavyball("SOAP"),
        },
    ),
    "every_tenth_kl": (
        10,
        {
            "megaopt": ours(10, kl=True),
            "emerging-optimizers, every step": emerging(kl=True),
            "heavyball": heavyball("KLSOAP"),
        },
    ),
}
"""Steps that are timed together, and who makes them."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

PACKAGES = ("emerging-optimizers", "pytorch_optimizer", "heavyball")


def gradients() -> Iterator[torch.Tensor]:
    """Return Gaussian gradients, one after the other, and from the beginning when all were used."""
    generator = torch.Generator().manual_seed(0)
    return itertools.cycle([torch.randn(SIZE, SIZE, generator=generator) for _ in range(GRADIENTS)])


def candidate(make: Make, steps: int) -> Callable[[], None]:
    """Return some steps of one optimizer, which has made its first."""
    param = torch.nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02)
    optimizer, fresh = make([param]), gradients()

    def run() -> None:
        for _ in range(steps):
            param.grad = next(fresh).clone()  # some packages write into it
            optimizer.step()

    run()
    return run


def installed(package: str) -> str | None:
    """Return a distribution's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def measure(suite: str, rounds: int, clock: str) -> dict[str, Any]:
    """Return times and ratios of one suite, and print the ratios."""
    steps, makers = SUITES[suite]
    candidates, skipped = {}, {}
    for name, make in makers.items():
        try:
            candidates[name] = candidate(make, steps)
        except Exception as error:  # noqa: BLE001 - a peer that does not run here is reported, not fatal
            skipped[name] = f"{type(error).__name__}: {error}"[:200]
    times = interleave(candidates, rounds=rounds, warmup=1, clock=CLOCKS[clock])
    times = {name: [seconds / steps for seconds in values] for name, values in times.items()}
    slower = {name: ratio(times, name, "megaopt") for name in times if name != "megaopt"}
    print(suite, summary(times), slower, skipped or "", flush=True)
    return {"times": summary(times), "times_slower_than_megaopt": slower, "skipped": skipped}


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=list(SUITES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: where others use the machine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    versions = {name: installed(name) for name in PACKAGES}
    for suite in arguments.suites:
        result = measure(suite, arguments.rounds, arguments.clock)
        write_result(
            f"soap_{suite}", {"shape": (SIZE, SIZE), "clock": arguments.clock, "versions": versions, **result}
        )


if __name__ == "__main__":
    main()
