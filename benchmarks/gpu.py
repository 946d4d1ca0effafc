"""Every comparison on a GPU: steps against torch's and other packages', offload, graphs, memory.

    python benchmarks/gpu.py                    # every suite, into results/gpu_DEVICE.json
    python benchmarks/gpu.py adamw muon --rounds 50
    python benchmarks/gpu.py --device cpu --tiny  # tries the script itself; writes nothing

A goal that is missed is printed and written down, not fatal. Times are those between two CUDA events; candidates take
turns, and ratios are medians over rounds. Peers that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import subprocess
import sys
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from gpu_suites import SUITES, Bench
from harness import RESULTS

PACKAGES = (
    "megaopt-core",
    "megaopt-muon",
    "emerging-optimizers",
    "gram-newton-schulz",
    "torchao",
    "bitsandbytes",
)


def driver() -> str | None:
    """Return the driver's version; None where there is none to ask."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of what is compared."""
    found: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main() -> int:
    """Run the suites, print a line for each comparison, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=list(SUITES), help=", ".join(SUITES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="matrices of a sixteenth of the sides")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.suites) - set(SUITES))
    if unknown:
        parser.error(f"unknown suites {', '.join(unknown)}; there are {', '.join(SUITES)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; nothing was measured", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    bench = Bench(torch.device(arguments.device), arguments.rounds, 16 if arguments.tiny else 1)
    name = torch.cuda.get_device_name() if bench.is_cuda else platform.processor() or platform.machine()
    result: dict[str, Any] = {
        "device": name,
        "driver": driver(),
        "versions": versions(),
        "rounds": arguments.rounds,
    }
    for suite in arguments.suites:
        try:
            result[suite] = SUITES[suite](bench)
            gc.collect()
            if bench.is_cuda:  # what the next suite allocates is not to be cut from what this one left
                torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001 - the other suites are measured all the same
            traceback.print_exc()
            result[suite] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{suite}\n{json.dumps(result[suite], indent=1)}", flush=True)
    if bench.is_cuda:
        slug = re.sub(r"\W+", "_", name.lower())
        path = RESULTS / f"gpu_{slug}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
