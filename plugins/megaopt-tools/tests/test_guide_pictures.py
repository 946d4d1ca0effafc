"""The pictures of the guide show what the code says today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DRAW = Path(__file__).parents[3] / "docs" / "images" / "draw.py"
pytestmark = [
    pytest.mark.any_python,
    pytest.mark.skipif(not DRAW.is_file(), reason="these tests run without the sources around them"),
]


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """What draws them."""
    for needed in ("matplotlib", "megaopt_distributed", "megaopt_layerwise", "megaopt_muon"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("draw", DRAW)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shapes(path: Path) -> tuple[list[str], int]:
    """What is written in a picture, and how many shapes it has: the same with every version of what draws it."""
    text = path.read_text()
    return re.findall(r"<text[^>]*>([^<]*)</text>", text), text.count("<path")


@pytest.mark.parametrize("name", ["house", "schedules", "buckets", "remainders", "owners"])
def test_a_picture_is_what_would_be_drawn_now(name: str, drawing: ModuleType, tmp_path: Path) -> None:
    """Its words and its shapes."""
    assert name in drawing.PICTURES
    assert _shapes(drawing.draw(name, tmp_path)) == _shapes(DRAW.with_name(f"{name}.svg"))
