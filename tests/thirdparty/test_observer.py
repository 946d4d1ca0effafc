"""The observer of the guide, packed and installed as a plugin of its own, says which experts get no gradient."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from installing import install_wheel

PAGE = Path(__file__).parents[2] / "docs" / "writing-an-observer.md"
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "megaopt-experts"
version = "0.1.0"
dependencies = ["megaopt-core"]

[project.entry-points.megaopt]
experts = "the_module"
"""
PROGRAM = """\
import sys

import torch
from torch import nn

from megaopt_core import build_optimizer

experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
model = nn.ModuleDict({"experts": experts, "norm": nn.LayerNorm(2)})
optimizer = build_optimizer(model, "sgd", lr=0.1)
for name, param in model.named_parameters():
    if name not in sys.argv[1:]:
        param.grad = torch.ones_like(param)
print(optimizer.step().update_successful)
"""


def _observer_of_the_page() -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return code


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page's plugin is installed."""
    project = tmp_path_factory.mktemp("observer") / "megaopt-experts"
    (project / "src").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "src" / "the_module.py").write_text(_observer_of_the_page())
    target = tmp_path_factory.mktemp("installed")
    install_wheel(project, target)
    return target


def _told(installed: Path, *without_gradient: str) -> list[str]:
    """Return what one step of the model says on the error stream."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("MEGAOPT_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *without_gradient],
        env={**known, "PYTHONPATH": str(installed), "MEGAOPT_PLUGINS": "experts,adam"},
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stdout + done.stderr
    return [line for line in done.stderr.splitlines() if "no gradient on any rank" in line]


def test_an_expert_without_a_gradient_is_named_once(installed: Path) -> None:
    """A parameter of no expert is not named, with or without a gradient."""
    assert _told(installed, "experts.1.weight", "norm.bias") == [
        "experts.1.weight has no gradient on any rank"
    ]


def test_nothing_is_said_where_all_experts_have_gradients(installed: Path) -> None:
    """Neither experts nor others are named."""
    assert _told(installed) == []


def test_the_page_uses_public_names() -> None:
    """A third party can write it."""
    modules = re.findall(r"^(?:from|import) (megaopt\S*)", _observer_of_the_page(), re.MULTILINE)
    assert modules == ["megaopt_core", "megaopt_core.plugin_api"]
