"""Headings and sentences have a noun as subject: whoever learned English late reads them once."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[3]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
]
QUOTES = {"bridge-classes.md"}
"""Pages that quote the messages of other packages."""
QUESTION = r"(?:What|Whatever|Who|Whoever|Whose|Which|Why|How)\b"


def _prose(page: Path) -> str:
    """Return a page without its code."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "`code`", text)


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, items of lists and cells of tables."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|:]|\d+\.)\s)|\|", text):
        yield from re.split(r"(?<=[.:;!?])\s+", " ".join(block.split()).lstrip("-*: "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_heading_begins_with_a_question_word(page: Path) -> None:
    """A noun says what stands below: *Owners*, not *Who owns what*."""
    headings = re.findall(r"^#+ +(.+)$", _prose(page), re.MULTILINE)
    assert headings
    assert [heading for heading in headings if re.match(rf"{QUESTION}|(?:Where|When)\b", heading)] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in QUOTES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_sentence_has_a_question_word_as_subject(page: Path) -> None:
    """*The other parameters are cut by elements*, not *What is not a matrix is cut by elements*."""
    found = [sentence for sentence in _sentences(_prose(page)) if re.match(QUESTION, sentence)]
    assert [sentence for sentence in found if not sentence.endswith("?")] == []


def test_such_sentences_are_seen() -> None:
    """At the beginning of a paragraph, in an item of a list, and in a cell of a table."""
    text = "What is cut travels. Why not?\n\n- Who is left waits.\n\n| a | Which one holds is said below |"
    assert [sentence for sentence in _sentences(text) if re.match(QUESTION, sentence)] == [
        "What is cut travels.",
        "Why not?",
        "Who is left waits.",
        "Which one holds is said below",
    ]
