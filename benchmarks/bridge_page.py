"""The page of what came of classes of other packages, from the results of `bridge_table.py`."""

from collections.abc import Iterator, Mapping
from typing import Any

from megaopt_bridge.recipes import recipe_of
from megaopt_testing import CHECKS

_HEAD = """# Classes of other packages

Made by `python benchmarks/bridge_table.py` from `benchmarks/results/bridge.json`, with {versions}, Python {python}.
{passing} classes pass every check of the conformance kit that can be made of them, {failing} fail some, {refused} are
refused.

"Cut" is how finely their work may be cut over ranks, by trial ({{doc}}`bridge`). The checks, of which
{{doc}}`writing-a-plugin` tells more, are numbered:

{legend}

A check that cannot be made of a class is shown as `-`.
"""


def page(results: Mapping[str, Any]) -> str:
    """Return the page."""
    classes: Mapping[str, Mapping[str, Any]] = results["classes"]
    stepped = {name: found for name, found in classes.items() if "checks" in found}
    failing = [name for name, found in stepped.items() if found["messages"]]
    refused = {name: found for name, found in classes.items() if name not in stepped}
    ids = [check.id for check in CHECKS if any(check.id in found["checks"] for found in stepped.values())]
    head = _HEAD.format(
        versions=", ".join(f"{name} {number}" for name, number in sorted(results["versions"].items())),
        python=results["python"],
        passing=len(stepped) - len(failing),
        failing=len(failing),
        refused=len(refused),
        legend=", ".join(f"{number} `{id_}`" for number, id_ in enumerate(ids, 1)),
    )
    lines = [head, "## What they pass", ""]
    lines += _table(stepped, ids)
    lines += ["", "## What fails, and why", "", "| class | check | why |", "|---|---|---|"]
    lines += _failures({name: stepped[name] for name in failing})
    lines += ["", "## What is refused, and why", "", "| class | why |", "|---|---|"]
    lines += [f"| `{name}` | {_words(_reason(found))} |" for name, found in refused.items()]
    return "\n".join(lines) + "\n"


def _table(stepped: Mapping[str, Mapping[str, Any]], ids: list[str]) -> Iterator[str]:
    yield "| class | cut | " + " | ".join(str(number) for number, _ in enumerate(ids, 1)) + " |"
    yield "|---|---|" + ":-:|" * len(ids)
    shown = {"passed": "✓", "failed": "**✗**", "skipped": "-"}
    for name, found in stepped.items():
        cells = [shown.get(found["checks"].get(id_, ""), "") for id_ in ids]
        yield f"| `{name}` | {found['granularity']} | {' | '.join(cells)} |"


def _failures(failing: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, found in failing.items():
        known = recipe_of(*name.split(":")).fails
        for id_, message in found["messages"].items():
            yield f"| `{name}` | `{id_}` | {_words(known.get(id_) or _first_sentence(message, name))} |"


def _reason(found: Mapping[str, Any]) -> str:
    return str(found.get("refused") or found.get("error"))


def _first_sentence(message: str, name: str) -> str:
    return message.removeprefix(f"'{name}': ").splitlines()[0].split(". ")[0][:240]


def _words(text: str) -> str:
    """Return text that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
