"""Writes the page of all optimizers, `docs/gallery.md`, and the page of known plugins, `docs/plugins.md`.

What an optimizer is comes from its entry, what it keeps from a small model that is built here, its curve from a
record of `megaopt compare`, what the conformance kit says from `results/kit.json`. Paper and formula stand in
`gallery.toml`:

    python benchmarks/gallery.py --kit                       # makes the checks, and writes results/kit.json
    python benchmarks/gallery.py --curves demo/compare.json  # takes curves from a comparison; others' stay
    python benchmarks/gallery.py                             # writes both pages
"""

from __future__ import annotations

import argparse
import json
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from megaopt_core import build_optimizer, get_registry

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
FORMULAS = HERE / "gallery.toml"
IMAGES = ROOT / "docs" / "images"
_SPLIT = "; its step can be split, so that slices can be stepped too"
_ABOUT = """\
# Gallery of optimizers

This page shows every optimizer of megaopt's own distributions: its source, its formula, its state, the strategies
that shard it, and the result of the conformance kit. The curves are from one comparison on the demo
({doc}`training`). The script `benchmarks/gallery.py` writes this page.

In the formulas $g$ is the gradient, $w$ the parameter, $\\eta$ the learning rate and $\\lambda$ the weight decay.
"""


def state_bytes(name: str) -> tuple[float, float]:
    """Return bytes of state per parameter: of a hidden matrix of 512 x 512, and of a vector, in fp32."""
    hidden = nn.Linear(512, 512)
    model = nn.Sequential(nn.Linear(16, 512), nn.GELU(), hidden, nn.GELU(), nn.Linear(512, 4))
    built = build_optimizer(model, name, lr=1e-3)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    built.step()
    found = []
    for param in (hidden.weight, hidden.bias):
        state = built.state[param].values()
        held = [value for value in state if isinstance(value, torch.Tensor) and value.numel() > 1]
        found.append(sum(value.numel() * value.element_size() for value in held) / param.numel())
    return found[0], found[1]


def strategies(name: str) -> str:
    """Return the sharding strategies that take an optimizer as it is."""
    registry = get_registry()
    entry = registry.optimizer(name)
    found = [
        sharding
        for sharding, strategy in sorted(registry.strategies().items())
        if entry.granularity in strategy.granularities and not sharding.startswith("kit_")
    ]
    return ", ".join(f"`{sharding}`" for sharding in found)


def make_checks(names: list[str]) -> None:
    """Run the conformance kit on every optimizer, and write down what came of it."""
    from megaopt_testing import run_checks
    from megaopt_testing.tally import Tally

    found = {}
    for name in names:
        found[name] = str(Tally.of(run_checks(name)))
        print(name, found[name], flush=True)
        (RESULTS / "kit.json").write_text(json.dumps(found, indent=1) + "\n")


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the loss of one run, smoothed, in bits per byte."""
    from matplotlib.figure import Figure
    from megaopt_tools.pictures import smooth

    losses = [loss / 0.6931471805599453 for loss in record["losses"]]
    figure = Figure(figsize=(4.2, 1.8))
    axes = figure.subplots()
    axes.plot(smooth(losses, len(losses) / 25), color="#0072B2", linewidth=1.6)
    axes.set(xlabel="step", ylabel="bits/byte", ylim=(1.5, 6.0))
    axes.set_title(f"lr {record['lr']:g}: {record['val_bits_per_byte']:.3f} held out", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def settings_table(name: str) -> list[str]:
    """Return the settings that an optimizer's own entry declares."""
    entry = get_registry().optimizer(name)
    if entry.settings is None:
        return []
    prefix = entry.setting_prefixes[0]
    rows = [
        f"| `{prefix}_{field.name}` | `{default(field)}` | {field.metadata.get('help', '')} |"
        for field in attrs.fields(entry.settings)
    ]
    return ["", "| setting | default | what it does |", "|---|---|---|", *rows]


def default(field: Any) -> Any:
    """Return a default as the page shows it."""
    return str(field.default).removeprefix("torch.")


def section(name: str, known: dict[str, Any], kit: dict[str, str], curves: dict[str, Any]) -> list[str]:
    """Return what the page says of one optimizer."""
    registry = get_registry()
    entry, owner = registry.optimizer(name), registry.owner("optimizer", name)
    matrix, vector = state_bytes(name)
    lines = [
        f"## {name}",
        "",
        f"{entry.description[:1].upper()}{entry.description[1:]}.",
        "",
        f"$${known['formula'].strip()}$$",
        "",
        "| | |",
        "|---|---|",
        f"| paper | {known['paper']} |",
        f"| from | `{owner.distribution}` |",
        f"| memory | {matrix:.1f} bytes of state a parameter of a hidden matrix, {vector:.1f} of a vector; in fp32 |",
        f"| granularity | {entry.granularity.value}{_SPLIT if entry.split_step is not None else ''} |",
        f"| strategies | {strategies(name)} |",
        f"| conformance kit | {kit.get(name, 'not run')} |",
        *settings_table(name),
        "",
    ]
    if name in curves:
        best = curves[name]
        draw(best, IMAGES / f"gallery-{name}.svg")
        lines += [
            f"![Loss of {name} on the demo](images/gallery-{name}.svg)",
            "",
        ]
    return lines


def gallery(names: list[str], curves: dict[str, Any]) -> str:
    """Return the page of all optimizers."""
    known = tomllib.loads(FORMULAS.read_text())
    kit = json.loads((RESULTS / "kit.json").read_text()) if (RESULTS / "kit.json").exists() else {}
    lines = [_ABOUT]
    for name in names:
        lines += section(name, known[name], kit, curves)
    return "\n".join(lines).rstrip() + "\n"


def directory() -> str:
    """Return the page of known plugins, from the metadata of what is installed and lists itself."""
    registry = get_registry()
    registry.load()
    rows = []
    for plugin in sorted(registry.loaded_plugins(), key=lambda plugin: plugin.info.distribution or ""):
        if plugin.info.is_core or plugin.info.distribution is None:
            continue
        about = metadata(plugin.info.distribution)
        offered = [
            f"{what}: {', '.join(f'`{name}`' for name in sorted(names) if not name.startswith('kit_'))}"
            for what, names in (
                ("optimizers", plugin.offers["optimizer"]),
                ("strategies", plugin.offers["strategy"]),
                ("schedules", plugin.offers["schedule"]),
                ("precision policies", plugin.offers["precision"]),
            )
            if [name for name in names if not name.startswith("kit_")]
        ]
        offered += [words for hook, words in HOOKS.items() if plugin.has(hook)]
        rows.append(f"| `{plugin.info.distribution}` | {about['Summary']} | {'; '.join(offered)} |")
    return DIRECTORY.replace("ROWS", "\n".join(rows))


HOOKS = {
    "megaopt_annotate_params": "reads models",
    "megaopt_resolve_optimizer": "any class by its name",
    "megaopt_learn_state": "learns the states of classes",
    "megaopt_after_step": "writes after steps",
    "megaopt_step_observers": "watches steps",
    "megaopt_step_runner": "place of states and steps",
    "megaopt_process_groups": "process groups of trainers' models",
    "megaopt_commands": "commands",
}
"""For each hook, the offer of a plugin that implements it, beside the offers with names."""

DIRECTORY = """\
# Known plugins

The table lists distributions with an entry point in the group `megaopt`, with the description from their metadata.
Install one with `pip install NAME`, and use its contents by name. `megaopt plugins` shows the installed ones.

| distribution | description | offers |
|---|---|---|
ROWS

`benchmarks/gallery.py` writes this page from the installed distributions. To be listed, publish a plugin
({doc}`publishing`) and propose its name for the environment in which the page is made. You write nothing else: the
row comes from your `pyproject.toml`. People also find plugins at the package index by the keywords of `megaopt
new-plugin`: `megaopt`, and `megaopt-optimizer`, `megaopt-strategy`, `megaopt-schedule` or `megaopt-roles`.
"""


def main() -> None:
    """Make checks, take curves, or write both pages."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kit", action="store_true", help="make the checks of the conformance kit")
    parser.add_argument("--curves", type=Path, help="the compare.json of a comparison")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(tomllib.loads(FORMULAS.read_text()))
    kept = RESULTS / "demo_compare.json"
    if args.kit:
        make_checks(names)
    if args.curves is not None:
        runs = json.loads(args.curves.read_text())["runs"]
        keys = ("optimizer", "lr", "val_bits_per_byte", "losses")
        found = {run["optimizer"]: run for run in (json.loads(kept.read_text()) if kept.exists() else [])}
        found.update({run["optimizer"]: {key: run[key] for key in keys} for run in runs})
        kept.write_text(json.dumps(list(found.values())) + "\n")
    curves = {run["optimizer"]: run for run in json.loads(kept.read_text())} if kept.exists() else {}
    (ROOT / "docs" / "gallery.md").write_text(gallery(names, curves))
    (ROOT / "docs" / "plugins.md").write_text(directory())


if __name__ == "__main__":
    main()
