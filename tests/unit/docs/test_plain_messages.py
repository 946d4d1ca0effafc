"""Messages, reasons and help read as the pages do: short clauses, and no words that a reader has to look up twice."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[3]
PACKAGES = [ROOT / "megaopt_core", *sorted((ROOT / "plugins").glob("*/src/megaopt_*"))]
PACKAGES = [path for path in PACKAGES if (path / "__init__.py").exists()]
LONGEST = 28
"""Words between two marks of punctuation that end a thought."""
VAGUE = re.compile(
    r"\b(?:otherwise than|elsewhere than|which there is not|whoever|whatever|somebody|nobody|"
    r"(?:is|are|was|were) to be)\b",
    re.IGNORECASE,
)
QUESTION = re.compile(r"(?:What|Who|Whose) ", re.IGNORECASE)


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and words of every string of a module but docstrings; a value in an f-string is one word."""
    inside = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in bare:
            continue
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def _faults(text: str) -> list[str]:
    """Return what makes a reader read a message twice."""
    if "\n" in text:  # code and tables
        return []
    found = [f"vague: {word}" for word in VAGUE.findall(text)]
    for clause in re.split(r"(?<=[.:;?!])\s+", text):
        words = clause.split()
        if len(words) > LONGEST:
            found.append(f"{len(words)} words: {clause}")
        if len(words) > 3 and QUESTION.match(clause) and not clause.endswith("?"):
            found.append(f"a question word as subject: {clause}")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_messages_are_read_once(package: Path) -> None:
    """The words of errors, warnings, reports and help of every module."""
    texts = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sorted(package.rglob("*.py"))
        for line, text in _texts(ast.parse(path.read_text()))
    ]
    assert texts
    assert [(place, fault) for place, text in texts for fault in _faults(text)] == []


def test_each_fault_is_seen() -> None:
    """In strings and f-strings of calls and returns, not in docstrings."""
    tree = ast.parse(
        '"""Whoever reads this."""\n'
        "def f(x):\n"
        '    """What it does is said here."""\n'
        '    raise ValueError(f"{x}: what is cut is stepped elsewhere than before")\n'
        f'    return "{"word " * 29}"\n'
    )
    found = [fault.partition(":")[0] for _, text in _texts(tree) for fault in _faults(text)]
    assert sorted(found) == ["29 words", "a question word as subject", "vague"]
