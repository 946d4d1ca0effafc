"""Time one step of Muon against other packages', in turns, each in a process of its own.

    python benchmarks/muon_apart.py many_distinct --clock cpu

Training steps with one package, and oneDNN keeps 1,024 kernels in a process: where many shapes meet, packages that step
in one process throw each other's kernels away, and all of them compile in every round. Here each finds what it left.
Everything else is as in `benchmarks/muon.py`: new random gradients in every round, the same for all, in an order that
is shuffled anew; no round is dropped. The first step of a package, which compiles, is timed by itself.
"""

import argparse
import random
import statistics
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import summary, write_result
from megaopt_muon.choice.rates import processor_kind
from muon import CLOCKS, OPTIMIZERS, PEERS, PRECISIONS, SUITES, Gradients, installed, parameters, speedups
from torch.multiprocessing import get_context


def package(
    pipe: Connection, name: str, suite: str, precision: str, *, clock_name: str, threads: int
) -> None:
    """Step with one package for each message, and answer how long it took.

    Args:
        pipe: hears anything for a step, and None at the end; tells seconds, or why the package does not run here.
        name: of the package.
        suite: of parameters.
        precision: `medium` or `highest`.
        clock_name: of :data:`CLOCKS`.
        threads: that torch may use.
    """
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    clock, shapes = CLOCKS[clock_name], SUITES[suite][0]
    params, gradients = parameters(shapes), Gradients(shapes, concentrated="concentrated" in suite)
    try:
        optimizer = OPTIMIZERS[name](params, precision)
    except Exception as error:  # noqa: BLE001 - a peer that does not run here is reported, not fatal
        pipe.send(f"{type(error).__name__}: {error}"[:200])
        return
    if optimizer is None:
        pipe.send(f"does not compute in {precision}")
        return
    pipe.send(None)
    while pipe.recv() is not None:
        gradients.renew()
        for param, gradient in zip(params, gradients.current, strict=True):
            param.grad = gradient.clone()
        start = clock()
        optimizer.step()
        pipe.send(clock() - start)


def interleave_apart(
    names: list[str], rounds: int, *arguments: Any, **options: Any
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    """Time packages in turns, each in a process of its own.

    Args:
        names: of packages.
        rounds: how often each is timed, after two steps.
        arguments: of :func:`package`, after the name.
        options: the same.

    Returns:
        Name to seconds, one a round; name to the seconds of its first step; name to why it was left out.
    """
    context, pipes, skipped, processes = get_context("spawn"), {}, {}, []
    for name in names:
        pipe, far = context.Pipe()
        processes.append(context.Process(target=package, args=(far, name, *arguments), kwargs=options))
        processes[-1].start()
        reason = pipe.recv()
        if reason is None:
            pipes[name] = pipe
        else:
            skipped[name] = reason

    def step(name: str) -> float:
        pipes[name].send("step")
        return pipes[name].recv()

    first = {name: step(name) for name in pipes}
    for name in pipes:
        step(name)
    order, times = random.Random(0), {name: [] for name in pipes}  # noqa: S311 - nothing secret
    for _ in range(rounds):
        for name in order.sample(list(pipes), len(pipes)):
            times[name].append(step(name))
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return times, first, skipped


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=["many_distinct"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, help="measure one only")
    parser.add_argument("--peers", nargs="*", default=PEERS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    threads = options.threads > 1 and f"{options.threads}_threads"
    for suite in options.suites:
        result: dict[str, Any] = {
            "versions": {
                name: installed(name) for name in ("emerging-optimizers", "pytorch_optimizer", "heavyball")
            },
            "processor": processor_kind(),
            "clock": options.clock,
        }
        for precision in [options.precision] if options.precision else PRECISIONS:
            times, first, skipped = interleave_apart(
                ["megaopt", *options.peers],
                options.rounds,
                suite,
                precision,
                clock_name=options.clock,
                threads=options.threads,
            )
            slower = speedups(times)
            result[precision] = {
                "times": summary(times),
                "first_step_ms": {name: round(1e3 * seconds, 1) for name, seconds in first.items()},
                "times_slower_than_megaopt": slower,
                "skipped": skipped,
            }
            print(
                f"{suite:18} {precision:8}", f"{1e3 * statistics.median(times['megaopt']):.1f} ms", end="  "
            )
            print("  ".join(f"{name} {value['median']:.2f}" for name, value in slower.items()), skipped or "")
        write_result("_".join(filter(None, ("muon", suite, "apart", threads, processor_kind()))), result)


if __name__ == "__main__":
    main()
