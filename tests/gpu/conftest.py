"""Where the suite runs: on CUDA, or nowhere; `MEGAOPT_GPU_TESTS_ON=cpu` tries the tests themselves."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

ASKED = os.environ.get("MEGAOPT_GPU_TESTS_ON", "cuda")
AVAILABLE = ASKED != "cuda" or torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything here where there is no GPU."""
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not AVAILABLE:
                item.add_marker(pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests of this suite have not run."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/gpu" in report.nodeid]
    if skipped and not AVAILABLE:
        terminalreporter.write_line(f"GPU suite: {len(skipped)} tests were skipped, since there is no GPU")


@pytest.fixture
def device() -> torch.device:
    """The device that is tested."""
    return torch.device(ASKED)


@pytest.fixture
def on_cuda(device: torch.device) -> None:
    """Skip what a CPU has nothing of, when the tests themselves are tried there."""
    if device.type != "cuda":
        pytest.skip("about CUDA alone")
