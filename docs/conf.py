import ast
import importlib
import inspect
import pkgutil
import re
import sys
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
from public_api import modules

project = "megaopt"
author = "the megaopt developers"
copyright = author
version = release = distribution("megaopt-core").version

extensions = [
    "mathml",
    "myst_parser",
    "public_api",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinxcontrib.towncrier.ext",
]
exclude_patterns = ["_build", "_extensions"]

towncrier_draft_autoversion_mode = "draft"
towncrier_draft_include_empty = True
towncrier_draft_working_directory = Path(__file__).parent.parent

html_theme = "furo"
html_title = f"megaopt {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["megaopt.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "search_scorer.js")
html_math_renderer = "mathml"
html_copy_source = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# attrs fields are described under Attributes and Args; as members of their own they would be there twice.
napoleon_use_ivar = True
# Two modules may use one short name in their annotations, and one class may be public in two.
suppress_warnings = ["ref.python"]


def every_module(package: str) -> list[ModuleType]:
    """Import a package with all of its modules; autodoc warns of those that it cannot import."""
    found = [importlib.import_module(package)]
    for info in pkgutil.walk_packages(found[0].__path__, f"{package}.", onerror=lambda _: None):
        with suppress(ImportError):
            found.append(importlib.import_module(info.name))
    return found


def import_type_only_names(module: ModuleType) -> None:
    """Run what a module imports under `if TYPE_CHECKING`: autodoc evaluates annotations and `type` aliases."""
    with suppress(OSError):  # an empty file has no source
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                exec(compile(ast.Module(node.body, []), str(module.__file__), "exec"), vars(module))


# Only when every module is loaded: no circle is left that such an import could close.
packages = sorted({name.partition(".")[0] for name in modules()})
for module in [module for package in packages for module in every_module(package)]:
    import_type_only_names(module)


def code_spans(
    _app: Sphinx, _what: str, _name: str, _documented: Any, _options: Any, lines: list[str]
) -> None:
    """Read `code` in a docstring as code, as Markdown does and as it looks in an editor."""
    text = re.sub(r"``.*?``|:[\w:]+:`[^`]+`|`([^`]+)`(\w?)", _literal, "\n".join(lines))
    lines[:] = text.split("\n")


def _literal(span: re.Match[str]) -> str:
    code, following = span.groups()
    if code is None:
        return span[0]
    return f"``{code}``" + (f"\\ {following}" if following else "")


def setup(app: Sphinx) -> None:
    """Called by sphinx."""
    app.connect("autodoc-process-docstring", code_spans, priority=100)  # before napoleon adds markup
