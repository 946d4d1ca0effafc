"""The page about the configuration lists every core field, and its examples run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megaopt_core.config import core_field_info, dtype_name
from megaopt_core.registry import ALLOW, DISABLE

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def shown(value: Any) -> str:
    """A default as the page writes it."""
    return f"`{dtype_name(value)}`" if isinstance(value, torch.dtype) else f"`{value!r}`"


def table(*, supported: bool) -> str:
    """One of the two tables as it has to stand in the page."""
    rows = [
        f"| `{info.name}` | `{info.type}` | {shown(info.default)} | {info.help} |".replace(
            " | None`", " \\| None`"
        )
        for info in core_field_info()
        if ("Only the default is accepted" in info.help) is not supported
    ]
    return "\n".join(["| field | type | default | what it does |", "|---|---|---|---|", *rows]) + "\n"


def test_every_core_field_is_documented() -> None:
    """With its type, its default and the help that the command line shows."""
    assert PAGE.read_text().endswith(
        f"\n## Every core field\n\n`megaopt describe` prints these, and those above.\n\n{table(supported=True)}"
    )


def test_what_is_not_supported_stands_apart() -> None:
    """In a table of its own, of the same form."""
    assert f"is an error.\n\n{table(supported=False)}\n##" in PAGE.read_text()


def test_the_environment_variables_are_documented() -> None:
    """By the names that the code reads."""
    assert f"`{DISABLE}=a,b`" in PAGE.read_text()
    assert f"`{ALLOW}=a,b`" in PAGE.read_text()


def test_the_examples_run() -> None:
    """One after the other, as a reader would."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        if "megaopt_muon" in block:
            pytest.importorskip("megaopt_muon")
        exec(block, names)  # noqa: S102 - running the example is the test
