"""Formulas as MathML, which browsers draw by themselves: no script, no network."""

from __future__ import annotations

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on a line of its own."""
    formula = convert(node.astext(), display="block")
    self.body.append(f'<div class="math-block" tabindex="0">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by sphinx."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
