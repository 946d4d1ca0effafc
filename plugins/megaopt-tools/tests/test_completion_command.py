"""`megaopt completion` prints what a shell needs to complete commands and options, plugins' among them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from megaopt_tools import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_script_names_commands_and_options(capsys, shell) -> None:
    """Of the core and of plugins."""
    assert main(["completion", shell]) == 0
    script, err = capsys.readouterr()
    assert err == ""
    for word in ("explain", "compare", "optimizer", "batch-size"):
        assert word in script


def test_bash_completes_with_it(capsys) -> None:
    """A real shell is asked what follows `megaopt expl`, and `megaopt train --opt`."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    main(["completion", "bash"])
    script = capsys.readouterr().out
    for words, expected in ((["megaopt", "expl"], "explain"), (["megaopt", "train", "--opt"], "--optimizer")):
        ask = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _shtab_megaopt; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run([bash, "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]


def test_another_shell_is_refused(capsys) -> None:
    """With the command's own usage."""
    with pytest.raises(SystemExit) as stop:
        main(["completion", "fish"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: megaopt completion ")
