"""The examples of the READMEs run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    ("README.md", "megaopt_muon"),
    ("plugins/megaopt-adam/README.md", "megaopt_adam"),
    ("plugins/megaopt-fsdp/README.md", "megaopt_fsdp"),
    ("plugins/megaopt-layerwise/README.md", "megaopt_layerwise"),
    ("plugins/megaopt-muon/README.md", "megaopt_muon"),
    ("plugins/megaopt-soap/README.md", "megaopt_soap"),
]


@pytest.mark.parametrize(("readme", "plugin"), EXAMPLES)
def test_python_of_the_readme_runs(readme: str, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer can copy the example."""
    pytest.importorskip(plugin)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / readme).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(block, {})  # noqa: S102 - running the example is the test
    assert capsys.readouterr().err == ""
