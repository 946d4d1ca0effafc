"""`megaopt explain --html` writes one page that needs nothing else; big models are told in few rows."""

import json
import re

import pytest
import torch
from megaopt_testing.fake_plugins import FakePlugins
from megaopt_tools import main
from megaopt_tools.inspection.explain_page import write_page

pytestmark = pytest.mark.any_python

MANY = 60
PLUGIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD)}
"""
MODELS = f"""
import torch

def deep():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range({MANY})])
    for layer in model:
        layer.weight.use_muon = False
    return model
"""


@pytest.fixture
def deep(plugins: FakePlugins, monkeypatch: pytest.MonkeyPatch) -> str:
    """A factory of a model with many layers that are alike."""
    monkeypatch.chdir(plugins.folder)
    monkeypatch.setenv("COLUMNS", "200")
    plugins.install("one", PLUGIN)
    plugins.registry("roles", "tools")
    (plugins.folder / "deep_models.py").write_text(MODELS)
    return "deep_models:deep"


def _embedded(page: str) -> dict:
    return json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    )


def test_the_page_holds_every_parameter_and_loads_nothing(deep, tmp_path, capsys):
    """All data is in the file; it names no other address."""
    page = tmp_path / "page.html"
    assert main(["explain", deep, "--optimizer", "plain", "--html", str(page)]) == 0
    text = page.read_text()
    assert [row["name"] for row in _embedded(text)["parameters"]][:2] == ["0.weight", "0.bias"]
    assert len(_embedded(text)["parameters"]) == 2 * MANY
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", text)
    assert "wrote " in capsys.readouterr().err


def test_nothing_in_a_name_can_end_the_data_early(tmp_path):
    """A script end tag inside a reason stays data."""
    explained = {"model": "m", "config": {}, "frozen": [], "parameters": [{"name": "</script><b>"}]}
    write_page(str(tmp_path / "page.html"), explained)
    assert _embedded((tmp_path / "page.html").read_text()) == explained


def test_a_page_that_cannot_be_written_is_one_clean_error(deep, tmp_path, capsys):
    """The error names the option and the path."""
    path = tmp_path / "missing" / "page.html"
    assert main(["explain", deep, "--optimizer", "plain", "--html", str(path)]) == 2
    assert f"--html {path}: cannot be written: No such file or directory" in capsys.readouterr().err


def test_layers_that_are_alike_share_a_row_unless_all_are_asked_for(deep, capsys):
    """120 parameters stand in few rows with a count; --all shows each."""
    main(["explain", deep, "--optimizer", "plain"])
    short = capsys.readouterr().out
    assert re.search(rf"^\*\.weight +{MANY - 1} +4x4 ", short, re.MULTILINE)
    assert short.startswith(f"{2 * MANY} parameters, ")
    main(["explain", deep, "--optimizer", "plain", "--all"])
    assert (
        len([line for line in capsys.readouterr().out.splitlines() if re.match(r"\d+\.(weight|bias) ", line)])
        == 2 * MANY
    )


def test_a_model_of_400_billion_parameters_is_explained_without_weights(deep):
    """A mixture of experts with 60 layers of 128 experts is routed on the meta device."""
    from megaopt_core import OptimizerConfig, route

    with torch.device("meta"):
        experts = torch.nn.Linear(4096, 4096 * 3, bias=False)
        model = torch.nn.ModuleList(
            [
                torch.nn.ModuleList([torch.nn.Linear(4096, 4096 * 3, bias=False) for _ in range(128)])
                for _ in range(60)
            ]
        )
    routing = route(OptimizerConfig(optimizer="plain", lr=0.1), model)
    assert sum(entry.spec.numel for entry in routing.params.values()) == 60 * 128 * experts.weight.numel()
