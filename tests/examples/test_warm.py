"""Scripts that are run by warm processes end as those that Python and torchrun start: tests of pages rest on that."""

import os
from pathlib import Path

import pytest
from warm import run_python, run_torchrun

TIMEOUT = 300.0


def _python(tmp_path: Path, code: str, *arguments: str) -> tuple[int, str, str]:
    (tmp_path / "script.py").write_text(code)
    done = run_python(
        ["script.py", *arguments], cwd=tmp_path, env={**os.environ, "GIVEN": "here"}, timeout=TIMEOUT
    )
    return done.returncode, done.stdout, done.stderr


def test_a_script_has_its_arguments_folder_environment_and_neighbours(tmp_path: Path) -> None:
    """And is the main module, which does at exit what it has said."""
    (tmp_path / "beside.py").write_text("value = 'beside'")
    code = (
        "import atexit, os, sys, beside\n"
        "atexit.register(print, 'end')\n"
        "print(__name__, sys.argv[1:], os.getcwd(), os.environ['GIVEN'], beside.value)\n"
    )
    shown = f"__main__ ['--so', 'many'] {tmp_path} here beside\nend\n"
    assert _python(tmp_path, code, "--so", "many") == (0, shown, "")


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no such thing')", 1, "no such thing\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_how_a_script_ends_is_seen(tmp_path: Path, code: str, status: int, told: str) -> None:
    """By its status, and by what it says."""
    ended, _, err = _python(tmp_path, code)
    assert ended == status
    assert err.endswith(told)


def test_a_script_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """With all that it has printed in the error, and where it stood."""
    (tmp_path / "script.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    with pytest.raises(TimeoutError, match=r'(?s)begun.*script.py", line 3 in <module>'):
        run_python(["script.py"], cwd=tmp_path, env=os.environ, timeout=3.0)


def test_ranks_that_take_too_long_tell_where_they_stand(tmp_path: Path) -> None:
    """Each of them, and the launcher that waits."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)")
    start = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py"]
    with pytest.raises(TimeoutError) as late:
        run_torchrun(start, cwd=tmp_path, env=os.environ, timeout=15.0)
    assert str(late.value).count('train.py", line 2 in <module>') == 2
    assert "_as_launcher" in str(late.value)


def test_ranks_meet_and_the_fault_of_one_is_everybodys(tmp_path: Path) -> None:
    """As with torchrun, whose launcher it is."""
    code = (
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(())\n"
        "dist.all_reduce(total)\n"
        "print(f'{int(total)} of {os.environ[\"WORLD_SIZE\"]}', flush=True)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "if sys.argv[1:] == [os.environ['RANK']]:\n"
        "    raise ValueError('rank gives up')\n"
    )
    (tmp_path / "train.py").write_text(code)
    start = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py"]
    good = run_torchrun(start, cwd=tmp_path, env=os.environ, timeout=TIMEOUT)
    assert (good.returncode, sorted(good.stdout.splitlines())) == (0, ["2 of 2", "2 of 2"]), good.stderr
    bad = run_torchrun([*start, "1"], cwd=tmp_path, env=os.environ, timeout=TIMEOUT)
    assert bad.returncode == 1
    assert "ValueError: rank gives up" in bad.stderr
