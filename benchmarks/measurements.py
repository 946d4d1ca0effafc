"""Write docs/measurements.md: the processor, versions and commit of every file in results/.

    python benchmarks/measurements.py

A file that notes its own commit is quoted; of another one the commit is shown that recorded it last.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "measurements.md"
NOT_MEASURED = {"bridge.json", "demo_compare.json", "kit.json"}
"""Outcomes of checks and of trainings, which no processor makes faster."""

HEAD = """# Sources of the numbers

Every measured number of this documentation is in a file of `benchmarks/results/`, together with its quartiles. The
table shows the processor or device of each file, the version of torch, the number of threads, and the commit. A test
compares the tables of the pages with the files. `python benchmarks/measurements.py` writes this page.

| file | processor or device | torch | threads | commit |
|---|---|---|---|---|
"""


def described(result: dict[str, Any]) -> tuple[str, str, str]:
    """Return processor or device, torch's version and the number of threads, as a result tells them."""
    environment = result.get("environment", result)
    versions = result.get("versions", {})
    machine = environment.get("machine", "not noted")
    capability = environment.get("capability")
    processor = result.get("device") or environment.get("processor")
    if processor is None:
        processor = f"{machine}, {capability}" if capability else machine
    torch = environment.get("torch") or versions.get("torch", "not noted")
    return processor, torch, str(environment.get("threads", ""))


def recorded_at(path: Path) -> str:
    """Return the commit that last changed a file."""
    asked = ["git", "log", "-1", "--format=%h", "--abbrev=8", "--", path.name]
    return subprocess.run(asked, cwd=path.parent, capture_output=True, text=True, check=True).stdout.strip()


def rows() -> list[tuple[str, ...]]:
    """Return a row for every measured file, without its commit unless the file notes it."""
    found: list[tuple[str, ...]] = []
    for path in sorted(RESULTS.glob("*.json")):
        if path.name in NOT_MEASURED:
            continue
        result = json.loads(path.read_text())
        commit = result.get("environment", result).get("commit", "")
        found.append((f"`{path.name}`", *described(result), commit))
    return found


def main() -> None:
    """Write the page."""
    lines = []
    for name, *cells, commit in rows():
        shown = commit or recorded_at(RESULTS / name.strip("`"))
        lines.append(f"| {' | '.join((name, *cells, shown))} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
