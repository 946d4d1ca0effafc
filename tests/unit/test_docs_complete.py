"""What users can name is documented: hooks, fields of entries and configurations, commands, checks."""

import re
from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from megaopt_testing import CHECKS, temporary_plugin

from megaopt_core import OptimizerEntry, get_registry
from megaopt_core.cli._program import CORE_COMMANDS, build_parser
from megaopt_core.config._optimizer_config import core_field_info
from megaopt_core.plugin_api import _hookspecs as hookspecs

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = [name for name in hookspecs.__all__ if name.startswith("megaopt_")]


def _page(name: str) -> str:
    return (DOCS / name).read_text()


def _every_page() -> str:
    return "\n".join(page.read_text() for page in DOCS.glob("*.md"))


def _python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", _page(name), re.DOTALL | re.MULTILINE)


def test_every_hook_has_a_section_with_its_arguments() -> None:
    """docs/hooks.md shows each hook as it is called."""
    headings = set(re.findall(r"^## `(megaopt_\w+)\(([^)]*)\)`$", _page("hooks.md"), re.MULTILINE))
    arguments = {name: getattr(hookspecs, name).__code__ for name in HOOKS}
    assert headings == {
        (name, ", ".join(code.co_varnames[: code.co_argcount])) for name, code in arguments.items()
    }


def test_the_guide_names_every_hook() -> None:
    """A plugin's author sees what there is."""
    assert [name for name in HOOKS if f"| `{name}` |" not in _page("writing-a-plugin.md")] == []


@pytest.mark.parametrize("block", _python_blocks("hooks.md"))
def test_the_examples_of_hooks_are_plugins(block: str) -> None:
    """Each loads, and its hook can be called."""
    module = ModuleType("example")
    exec(block, vars(module))  # noqa: S102 - running the example is the test
    (hook,) = [name for name in HOOKS if hasattr(module, name)]
    arguments = {
        "megaopt_annotate_params": {"model_chunk": _PackedAttention()},
        "megaopt_param_overrides": {"config": None, "model_chunks": [_PackedAttention()]},
        "megaopt_commands": {"commands": ArgumentParser().add_subparsers()},
    }
    with temporary_plugin(module) as registry:
        results = registry.call_each(hook, **arguments.get(hook, {}))
        assert registry.optimizers().keys() >= get_registry().optimizers().keys()
    assert hook == "megaopt_commands" or "temporary" in {info.name for info, _ in results}


def _PackedAttention() -> object:  # noqa: N802 - the example looks for a class of this name
    import torch

    class PackedAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = torch.nn.Linear(4, 12)

    return PackedAttention()


def test_every_field_of_an_entry_is_in_the_guide() -> None:
    """The table tells what it is and what holds without it."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", _page("writing-a-plugin.md"), re.MULTILINE)
    fields = {field.name for field in attrs.fields(OptimizerEntry)}
    assert fields - set(rows) == set()


def test_every_check_is_in_the_guide() -> None:
    """With the function that makes it."""
    page = _page("writing-a-plugin.md")
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


def test_every_command_is_in_the_documentation() -> None:
    """A page, or the README of the plugin that brings it, shows `megaopt NAME`."""
    readmes = [path.read_text() for path in DOCS.parent.glob("plugins/*/README.md")]
    pages = "\n".join([_every_page(), *readmes])
    (commands,) = [action for action in build_parser()._actions if isinstance(action, _SubParsersAction)]
    assert set(commands.choices) >= set(CORE_COMMANDS)
    assert [name for name in commands.choices if not re.search(rf"megaopt {name}\b", pages)] == []
