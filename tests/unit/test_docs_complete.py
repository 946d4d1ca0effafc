"""What users can name is documented: hooks, fields of entries and configurations, commands, checks."""

import re
from pathlib import Path

import attrs
from megaopt_testing import CHECKS

from megaopt_core import OptimizerEntry, get_registry
from megaopt_core.config._optimizer_config import core_field_info
from megaopt_core.plugin_api import _hookspecs as hookspecs

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = [name for name in hookspecs.__all__ if name.startswith("megaopt_")]


def _page(name: str) -> str:
    return (DOCS / name).read_text()


def _every_page() -> str:
    return "\n".join(page.read_text() for page in DOCS.glob("*.md"))


def test_every_hook_has_a_section_with_its_arguments() -> None:
    """docs/hooks.md and docs/hooks-storage.md show each hook as it is called."""
    pages = _page("hooks.md") + _page("hooks-storage.md")
    headings = set(re.findall(r"^## `(megaopt_\w+)\(([^)]*)\)`$", pages, re.MULTILINE))
    arguments = {name: getattr(hookspecs, name).__code__ for name in HOOKS}
    assert headings == {
        (name, ", ".join(code.co_varnames[: code.co_argcount])) for name, code in arguments.items()
    }


def test_the_guide_names_every_hook() -> None:
    """A plugin's author sees what there is."""
    assert [name for name in HOOKS if f"| `{name}` |" not in _page("writing-a-plugin.md")] == []


def test_every_field_of_an_entry_is_in_the_guide() -> None:
    """The table tells what it is and what holds without it."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", _page("optimizer-entry.md"), re.MULTILINE)
    fields = {field.name for field in attrs.fields(OptimizerEntry)}
    assert fields - set(rows) == set()


def test_every_check_is_in_the_guide() -> None:
    """With the function that makes it."""
    page = _page("conformance-kit.md")
    for check in CHECKS:
        assert re.search(rf"^\| `{check.id}` \| .+ \| `{check.function.__name__}` \|$", page, re.MULTILINE), (
            check.id
        )


def test_every_field_of_the_configuration_has_help_and_a_place_in_the_documentation() -> None:
    """docs/configuration.md lists the core's fields."""
    page = _page("configuration.md")
    fields = {info.name: info.help for info in core_field_info()}
    assert [name for name, text in fields.items() if not text] == []
    assert [name for name in fields if f"`{name}`" not in page] == []


def test_every_setting_of_the_installed_plugins_has_help() -> None:
    """`megaopt describe` has something to show."""
    assert [name for name, info in get_registry().setting_owners().items() if not info.help] == []
