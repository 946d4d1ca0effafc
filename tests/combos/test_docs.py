"""The Python examples of the guide run as they stand, from top to bottom of each page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "bridge.md": ("megaopt_bridge",),
    "checkpoints.md": ("megaopt_adam", "megaopt_checkpoint"),
    "faq.md": ("megaopt_muon",),
    "lion.md": ("megaopt_lion", "megaopt_roles"),
    "muon-learning-rate.md": ("megaopt_muon",),
    "routing.md": ("megaopt_adam", "megaopt_checkpoint", "megaopt_roles"),
    "start.md": ("megaopt_muon",),
}
"""What a page's examples need."""
pytestmark = pytest.mark.skipif(
    not all((DOCS / page).is_file() for page in PAGES),
    reason="these tests run without the sources around them",
)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_guide_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader can copy every example, one after the other."""
    monkeypatch.chdir(tmp_path)
    for plugin in PAGES[page]:
        pytest.importorskip(plugin)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # noqa: S102 - running the example is the test
