"""Scripts for several ranks run as the pages show them: the Python, then the line that starts it."""

import re
from pathlib import Path

import pytest
from pages import ROOT, run_script

SCRIPT = re.compile(
    r"^```python\n(?P<code>.*?)^```\n\n```console\n\$ (?P<command>torchrun [^\n]*train\.py)\n",
    re.DOTALL | re.MULTILINE,
)
SCRIPTS = [
    pytest.param(found["code"], found["command"], id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, found in enumerate(SCRIPT.finditer(page.read_text()))
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("code", "command"), SCRIPTS)
def test_a_script_of_the_guide_runs_over_ranks(code: str, command: str, tmp_path: Path) -> None:
    """From its imports to the end, on as many ranks as the page says."""
    for module in sorted(set(re.findall(r"megaopt_\w+", code)) | {"megaopt_muon", "megaopt_layerwise"}):
        pytest.importorskip(module)
    (tmp_path / "train.py").write_text(code)
    run_script(command, tmp_path)


def test_there_are_such_scripts() -> None:
    """The pages about ranks have them."""
    pages = {str(script.id).rpartition("-")[0] for script in SCRIPTS}
    assert pages >= {"distributed", "layer-wise", "stepping"}
