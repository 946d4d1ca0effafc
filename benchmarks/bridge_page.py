"""The page on classes of other packages, from the results of `bridge_table.py`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaopt_bridge.recipes import recipe_of
from megaopt_testing import CHECKS

_HEAD = """# Classes of other packages

Made by `python benchmarks/bridge_table.py` from `benchmarks/results/bridge.json`, with {versions}, Python {python}.
The kit has {checks} checks. {passing} classes pass every check that applies to them, {failing} fail some,
and {refused} are refused with a reason:

| source | pass | fail some | refused |
|---|--:|--:|--:|
{sources}

The tables below give the reason for each. heavyball compiles its arithmetic at the
first use; this was switched off here.

The column *cut* shows how finely the work of a class may be cut over ranks, found by trial ({{doc}}`bridge`).
{{doc}}`conformance-kit` explains the checks, which are numbered:

{legend}

`-`: the check does not apply to this class. `?`: it was not run.
"""


def page(results: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        results: what `bridge_table.py` wrote.
    """
    classes: Mapping[str, Mapping[str, Any]] = results["classes"]
    stepped = {name: found for name, found in classes.items() if "checks" in found}
    failing = [name for name, found in stepped.items() if found["messages"]]
    refused = {name: found for name, found in classes.items() if name not in stepped}
    ids = [check.id for check in CHECKS]
    head = _HEAD.format(
        versions=", ".join(_versions(classes)),
        python=results["python"],
        checks=len(ids),
        passing=len(stepped) - len(failing),
        failing=len(failing),
        refused=len(refused),
        sources="\n".join(_sources(stepped, failing, refused)),
        legend=", ".join(f"{number} `{id_}`" for number, id_ in enumerate(ids, 1)),
    )
    lines = [head, "## Results of each check", ""]
    lines += _table(stepped, ids)
    lines += ["", "## Failures", "", "| class | check | reason |", "|---|---|---|"]
    lines += _failures({name: stepped[name] for name in failing})
    lines += ["", "## Refused classes", "", "| class | reason |", "|---|---|"]
    lines += [f"| `{name}` | {_words(_reason(found))} |" for name, found in refused.items()]
    return "\n".join(lines) + "\n"


def _versions(classes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = {pair for about in classes.values() for pair in about.get("versions", {}).items()}
    return [f"{name} {number}" for name, number in sorted(found)]


def _sources(stepped: Mapping[str, Any], failing: Sequence[str], refused: Mapping[str, Any]) -> Iterator[str]:
    failed = set(failing)
    for source in dict.fromkeys(name.partition(":")[0] for name in (*stepped, *refused)):
        of = [name for name in stepped if name.startswith(f"{source}:")]
        bad = sum(name in failed for name in of)
        told = sum(name.startswith(f"{source}:") for name in refused)
        yield f"| `{source}` | {len(of) - bad} | {bad} | {told} |"


def _table(stepped: Mapping[str, Mapping[str, Any]], ids: Sequence[str]) -> Iterator[str]:
    yield "| class | cut | " + " | ".join(str(number) for number, _ in enumerate(ids, 1)) + " |"
    yield "|---|---|" + ":-:|" * len(ids)
    shown = {"passed": "✓", "failed": "**✗**", "skipped": "-"}
    for name, found in stepped.items():
        cells = [shown.get(found["checks"].get(id_, ""), "?") for id_ in ids]
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
    plain = "".join(letter for letter in text if letter.isprintable() or letter.isspace())
    return " ".join(plain.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
