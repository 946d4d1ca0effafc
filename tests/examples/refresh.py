"""Writes diffs and outputs into pages anew: `python tests/examples/refresh.py PAGE...`, without names all of them.

What still is what a command prints stays as it stands, lines that the page leaves out by `...` with it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from pages import FRONT, PATHS, ROOT, Page, diff_of, printed_by, require_alike, run

_SECONDS = re.compile(r"^\{'train_runtime'.*$", re.MULTILINE)
"""What the Trainer says of its time."""


def _newest(shown: str, printed: str) -> str:
    try:
        require_alike(shown, printed)
    except AssertionError:
        return _SECONDS.sub("...", printed)
    return shown or printed


def refresh(name: str) -> None:
    """Write the diff of a page's example into it, and what its commands print.

    Args:
        name: one of `PATHS`, or the front page.
    """
    path = ROOT / "docs" / f"{name}.md"
    text = path.read_text()
    if name == FRONT:
        (code,) = Page(name).blocks("python")
        (shown,) = Page(name).blocks("text")
        path.write_text(
            text.replace(f"```text\n{shown}```", f"```text\n{_newest(shown, printed_by(code))}```")
        )
        return
    example, _ = PATHS[name]
    if "```diff" in text:
        text = re.sub(
            r"^```diff\n.*?^```$",
            lambda _: f"```diff\n{diff_of(example)}```",
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
        path.write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        for command, shown in Page(name).runs():
            printed = run(command, Path(folder), example)
            text = text.replace(f"$ {command}\n{shown}", f"$ {command}\n{_newest(shown, printed)}")
    path.write_text(text)


if __name__ == "__main__":
    for each in sys.argv[1:] or [FRONT, *PATHS]:
        refresh(each)
