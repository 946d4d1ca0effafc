"""The core stays small: lines of code and statements of its rooms and of each plugin are counted and bounded."""

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]
CORE = ROOT / "megaopt_core"

CORE_LINES = 15_080
"""Lines of code of the core when it was last made smaller; whoever makes it smaller lowers this."""

ALL_LINES = 47_600
"""Lines of code of the core and all plugins: 46,000 when code began to leave the core, and 1,600 for runs that
resume and share ranks, suggested learning rates, transforms after a step, checks of observers, and steps that a device
stops by itself."""

MARGIN = 300
"""Lines that the core may grow by before something else has to leave it."""

LONGEST_FILE, LONGEST_FUNCTION = 400, 60
"""Lines of a file, and of a function without its docstring."""

LONG_FILES = {"megaopt_core/errors.py", "megaopt_core/optimizers/_base.py"}
LONG_FUNCTIONS = {
    "megaopt_core/optimizers/_building/builder.py:build",
    "megaopt_core/routing/_one_rank.py:route_this_rank",
    "plugins/megaopt-muon/src/megaopt_muon/adaptive.py:__init__",
    "plugins/megaopt-muon/src/megaopt_muon/muon.py:__init__",
    "plugins/megaopt-soap/src/megaopt_soap/soap.py:__init__",
}
"""Files and functions that are longer; none may be added."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _lines_of(*nodes: ast.stmt) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _code_lines(path: Path) -> frozenset[int]:
    """Return the numbers of the lines that hold code: no docstrings, comments and blank lines."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    docstrings = [
        node for node in ast.walk(_tree(path)) if isinstance(node, ast.Expr) and _is_docstring(node)
    ]
    return frozenset(lines - _lines_of(*docstrings))


def _statements(path: Path) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(_tree(path)))


def _rooms() -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the files of each room of the core and of each plugin."""
    yield "megaopt_core", sorted(CORE.glob("*.py"))
    for room in sorted(path for path in CORE.iterdir() if (path / "__init__.py").exists()):
        yield f"megaopt_core/{room.name}", sorted(room.rglob("*.py"))
    for source in sorted(ROOT.glob("plugins/megaopt-*/src")):
        yield source.parent.name, sorted(source.rglob("*.py"))


def _sizes() -> dict[str, tuple[int, int]]:
    return {
        name: (sum(len(_code_lines(path)) for path in files), sum(map(_statements, files)))
        for name, files in _rooms()
    }


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function of a file, as `file:name`, with its lines of code."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.name}", len(_lines_of(node) & _code_lines(path))


def test_the_core_grows_no_larger_than_its_budget() -> None:
    """The table of all rooms and plugins is printed: `pytest -s tests/unit/test_core_budget.py`."""
    sizes = _sizes()
    print(f"\n{'':32}{'lines':>8}{'statements':>12}")
    for name, (lines, statements) in sizes.items():
        print(f"{name:32}{lines:8}{statements:12}")
    core = sum(lines for name, (lines, _) in sizes.items() if name.startswith("megaopt_core"))
    everything = sum(lines for lines, _ in sizes.values())
    print(f"{'the core':32}{core:8}\n{'everything':32}{everything:8}")
    assert core <= CORE_LINES + MARGIN
    assert everything <= 1.02 * ALL_LINES


def test_no_file_and_no_function_is_too_long() -> None:
    """Those that are longer are known, and those that have become shorter are no longer listed."""
    files = [path for _, paths in _rooms() for path in paths]
    long_files = {
        str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > LONGEST_FILE
    }
    long_functions = {name for path in files for name, lines in _functions(path) if lines > LONGEST_FUNCTION}
    assert long_files == LONG_FILES
    assert long_functions == LONG_FUNCTIONS


def test_the_bounds_of_complexity_are_not_loosened() -> None:
    """Nor are lines longer: code that does not fit is taken apart."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["line-length"] <= 110
    assert ruff["lint"]["mccabe"]["max-complexity"] <= 10
    assert {"C90", "PL", "SIM"} <= set(ruff["lint"]["select"])
    assert not {"C901", "PLR0912", "PLR0915"} & set(ruff["lint"]["ignore"])


def test_lines_and_statements_are_counted_as_they_are_defined(tmp_path: Path) -> None:
    """A docstring, a comment and a blank line are none; a text in several lines is as many."""
    path = tmp_path / "some.py"
    code = [
        "value = (",
        "    1,",
        ")  # so",
        "",
        "",
        "def call():",
        '    """Do it."""',
        '    return """a',
        'b"""',
        "",
    ]
    path.write_text("\n".join(['"""Words.', "", "More.", '"""', "", "# why", *code]))
    assert len(_code_lines(path)) == 6
    assert _statements(path) == 3
