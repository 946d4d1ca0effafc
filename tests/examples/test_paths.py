"""Each page that leads from another place has the diff of its example, and shows what it prints."""

import runpy
import shutil
import subprocess

import pytest
import torch
from pages import EXAMPLES, FRONT, PATHS, Page, diff_of, printed_by, require_alike, run

LONG = ("fsdp-trainers",)
"""Its three scripts start Lightning, accelerate and the Trainer on two ranks each."""

WITH_DIFF = [page for page in PATHS if page not in ("fsdp-trainers", "resume-elsewhere", "which-strategy")]


@pytest.mark.parametrize("page", WITH_DIFF)
def test_a_page_shows_the_diff_of_its_example(page, tmp_path):
    """It is the difference of the two files, and `patch` applies it."""
    example, _ = PATHS[page]
    (shown,) = Page(page).blocks("diff")
    assert shown == diff_of(example)
    shutil.copy(EXAMPLES / example / "before.py", tmp_path)
    subprocess.run(["patch", "-s", "-p0"], cwd=tmp_path, input=shown, text=True, check=True, timeout=800)
    assert (tmp_path / "before.py").read_text() == (EXAMPLES / example / "after.py").read_text()


def test_the_front_page_shows_what_its_example_prints():
    """The six lines that a newcomer sees first."""
    pytest.importorskip("megaopt_muon")
    page = Page(FRONT)
    (code,), (shown,) = page.blocks("python"), page.blocks("text")
    assert len(code.partition("\n\n")[2].splitlines()) <= 6
    require_alike(shown, printed_by(code))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page if page not in LONG else pytest.param(page, marks=pytest.mark.long) for page in PATHS]
)
def test_a_page_shows_what_its_commands_print(page, tmp_path):
    """All of them, one after the other in one folder."""
    example, needed = PATHS[page]
    for module in ("megaopt_muon", "megaopt_checkpoint", *needed):
        pytest.importorskip(module)
    runs = Page(page).runs()
    assert runs
    for command, output in runs:
        require_alike(output, run(command, tmp_path, example))


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()))
def test_every_example_is_in_the_table(example):
    """examples/README.md lists it."""
    assert f"| [`{example}/`]({example}/) |" in (EXAMPLES / "README.md").read_text()


def test_ten_steps_equal_those_of_torchs_muon(capsys):
    """To the rounding of its iteration in bfloat16; Adam's part follows from it."""
    pytest.importorskip("megaopt_muon")
    before = runpy.run_path(str(EXAMPLES / "torch_muon" / "before.py"))["model"].state_dict()
    after = runpy.run_path(str(EXAMPLES / "torch_muon" / "after.py"))["model"].state_dict()
    capsys.readouterr()
    for name, value in before.items():
        assert torch.linalg.vector_norm(after[name] - value) <= 4e-3 * torch.linalg.vector_norm(value), name
