import ast
import importlib
import inspect
import pkgutil
import re
from contextlib import suppress
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

project = "megaopt"
author = "the megaopt developers"
copyright = author
version = release = distribution("megaopt-core").version

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "megaopt"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

packages = {
    "megaopt_core": "../megaopt_core",
    "megaopt_adam": "../plugins/megaopt-adam/src/megaopt_adam",
    "megaopt_bridge": "../plugins/megaopt-bridge/src/megaopt_bridge",
    "megaopt_checkpoint": "../plugins/megaopt-checkpoint/src/megaopt_checkpoint",
    "megaopt_device": "../plugins/megaopt-device/src/megaopt_device",
    "megaopt_distributed": "../plugins/megaopt-distributed/src/megaopt_distributed",
    "megaopt_fsdp": "../plugins/megaopt-fsdp/src/megaopt_fsdp",
    "megaopt_layerwise": "../plugins/megaopt-layerwise/src/megaopt_layerwise",
    "megaopt_lion": "../plugins/megaopt-lion/src/megaopt_lion",
    "megaopt_muon": "../plugins/megaopt-muon/src/megaopt_muon",
    "megaopt_roles": "../plugins/megaopt-roles/src/megaopt_roles",
    "megaopt_soap": "../plugins/megaopt-soap/src/megaopt_soap",
    "megaopt_testing": "../plugins/megaopt-testing/src/megaopt_testing",
    "megaopt_tools": "../plugins/megaopt-tools/src/megaopt_tools",
}

# One page a module, written into docs/api/ from the docstrings at every build.
apidoc_modules = [
    {"path": path, "destination": f"api/{name}", "separate_modules": True, "module_first": True}
    for name, path in packages.items()
]

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# attrs fields are described under Attributes and Args; as members of their own they would be there twice.
napoleon_use_ivar = True
# Two modules may use one short name in their annotations.
suppress_warnings = ["ref.python"]


def modules(package: str) -> list[ModuleType]:
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
for module in [module for package in packages for module in modules(package)]:
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


def skip_on_the_first_page(
    app: Sphinx, _what: str, _name: str, documented: Any, skip: bool, _options: Any
) -> bool | None:
    """Leave a public name to the page of its folder: the package's own page would describe it a second time."""
    is_first = app.env.docname == "api/megaopt_core/megaopt_core"
    home = getattr(documented, "__module__", None) or ""
    return True if is_first and home.startswith("megaopt_core.") else None


def setup(app: Sphinx) -> None:
    """Called by sphinx."""
    app.connect("autodoc-skip-member", skip_on_the_first_page)
    app.connect("autodoc-process-docstring", code_spans, priority=100)  # before napoleon adds markup
