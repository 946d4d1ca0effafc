"""Draws the pictures of the guide from what the code says: `python docs/images/draw.py`, into this folder.

Schedules are asked, layouts and owners are planned, bits are those of a number; nothing is drawn from memory.
The map of `explain` is a screenshot, for which Chromium and playwright are needed: `draw.py --explain`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from megaopt_distributed import DistributedDataParallelConfig, plan_full_param_layout
from megaopt_layerwise.planner import Work, plan_owners

from megaopt_core import OptimizerParamScheduler, ProcessGroupCollection
from megaopt_core.schedules import BUILTIN_STYLES

FOLDER = Path(__file__).parent
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756"]
EDGE = "#ffffff"


def _bar(axes: Axes, row: float, start: float, width: float, text: str, color: str) -> None:
    axes.barh(row, width, left=start, height=0.72, color=color, edgecolor=EDGE, linewidth=1.2)
    if text:
        axes.text(start + width / 2, row, text, ha="center", va="center", fontsize=8, color="white")


def _bare(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.invert_yaxis()


def draw_schedules(axes: Axes) -> None:
    """Learning rates of every built-in style, over 100 steps with 10 of warm-up.

    Args:
        axes: where to.
    """
    for number, style in enumerate(BUILTIN_STYLES):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        wsd = {"wsd_decay_steps": 25, "lr_wsd_decay_style": "linear"} if style == "WSD" else {}
        scheduler = OptimizerParamScheduler(
            optimizer, 0.0, 1.0, 0.1, 10, 100, style, 0.0, 0.0, 100, "constant", **wsd
        )
        rates = []
        for _ in range(121):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step(increment=1)
        axes.plot(rates, label=style, color=COLORS[number], linewidth=1.8)
    axes.set_xlabel("step (warm-up 10, decay until 100)")
    axes.set_ylabel("learning rate / max_lr")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def draw_buckets(axes: Axes) -> None:
    """The buffer of a small model in two buckets, and which part each of two ranks steps.

    Args:
        axes: where to.
    """
    model = torch.nn.Sequential()
    for number in range(3):
        model.append(torch.nn.Linear(12 + 4 * number, 16, device="meta"))
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=300
    )
    layout = plan_full_param_layout(model, config, ProcessGroupCollection())
    (buffer,) = layout.buffers.values()
    for number, (name, (start, stop)) in enumerate(buffer.param_ranges.items()):
        _bar(axes, 0, start, stop - start, name if stop - start > 60 else "", COLORS[number % 3])
    start = 0
    for bucket, end in enumerate(buffer.bucket_ends):
        _bar(axes, 1, start, end - start, f"bucket {bucket}", "#7f8c9a")
        middle = (start + end) / 2
        for rank, (first, last) in enumerate(((start, middle), (middle, end))):
            _bar(axes, 2 + rank, first, last - first, f"rank {rank} steps", COLORS[3 + 2 * rank])
        start = end
    axes.set_yticks(range(4), ["parameters", "buckets", "rank 0", "rank 1"])
    axes.set_xlabel("element of the buffer")
    _bare(axes)


def draw_remainders(axes: Axes) -> None:
    """The 32 bits of one fp32 number, as a bf16 parameter and 16 bits of remainder.

    Args:
        axes: where to.
    """
    value = torch.tensor(0.1, dtype=torch.float32)
    bits = f"{value.view(torch.int32).item() & 0xFFFFFFFF:032b}"
    parts = [(0, 1, "sign"), (1, 9, "exponent"), (9, 16, "fraction"), (16, 32, "fraction, low 16 bits")]
    for (start, stop, name), color in zip(parts, [*COLORS[:3], COLORS[5]], strict=True):
        for bit in range(start, stop):
            _bar(axes, 0, bit, 1, bits[bit], color)
        axes.text((start + stop) / 2, -0.55, name, ha="center", fontsize=8, color="#333333")
    _bar(axes, 1, 0, 16, "the model's parameter, bfloat16", "#7f8c9a")
    _bar(axes, 1, 16, 16, "remainder, int16: all that the optimizer keeps", COLORS[5])
    _bar(axes, 2, 0, 32, f"what is stepped: {value.item():.9g}, put together from both", "#4d5a66")
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_ylim(-0.8, 2.5)
    _bare(axes)


def draw_owners(axes: Axes) -> None:
    """Two blocks of a transformer over three ranks: the length of a bar is what its matrices cost in a step.

    Args:
        axes: where to.
    """
    works = []
    for block in range(2):
        for name, rows, columns in (("qkv", 3, 1), ("proj", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            numel = rows * columns * 768**2
            cost = float(min(rows, columns) ** 2 * max(rows, columns))
            works.append(Work(f"{block}.{name}", cost=cost, numel=numel, state_bytes=4 * numel))
    plan = plan_owners(works, 3)
    filled = [0.0] * 3
    for number, work in enumerate(works):
        (rank,) = plan.owners[work.name].ranks
        _bar(axes, rank, filled[rank], work.cost, work.name, COLORS[number % 4])
        filled[rank] += work.cost
    axes.axvline(sum(filled) / 3, color="#333333", linewidth=1, linestyle=":")
    axes.set_yticks(range(3), [f"rank {rank}" for rank in range(3)])
    axes.set_xlabel("cost of the step, in units of one 768 x 768 matrix; dotted: the mean")
    _bare(axes)


def draw_house(axes: Axes) -> None:
    """The folders of the core by layers, and the distributions beside it with what they lean on, from their metadata.

    Args:
        axes: where to.
    """
    root = FOLDER.parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    for row, layer in enumerate(layers, 1):
        names = [name.strip().removeprefix("megaopt_core.") for name in layer.split("|")]
        for place, name in enumerate(names):
            _bar(axes, row, place * 4.8 / len(names), 4.8 / len(names), name, COLORS[0])
    projects = [
        tomllib.loads(path.read_text())["project"] for path in sorted(root.glob("plugins/*/pyproject.toml"))
    ]
    for row, project in enumerate(projects, 1):
        needs = [re.match(r"megaopt-(\w+)", need) for need in project["dependencies"]]
        ours = [found[1] for found in needs if found and found[1] != "core"]
        leans = "all that trains" if len(ours) > 4 else ", ".join(ours)
        _bar(axes, row, 5.6, 2.0, project["name"], COLORS[3])
        if leans:
            axes.text(7.7, row, f"with {leans}", ha="left", va="center", fontsize=8)
    for x, title in (
        (2.4, "megaopt-core: a folder imports only from lower ones"),
        (6.6, "plugins, a distribution each"),
    ):
        axes.text(x, 0, title, ha="center", va="center", fontsize=9, fontweight="bold")
    axes.set_xlim(0, 9.6)
    axes.set_xticks([])
    axes.set_yticks([])
    _bare(axes)


PICTURES = {
    "house": (draw_house, (9.0, 4.6)),
    "schedules": (draw_schedules, (6.4, 3.2)),
    "buckets": (draw_buckets, (8.0, 2.2)),
    "remainders": (draw_remainders, (8.0, 1.8)),
    "owners": (draw_owners, (6.4, 2.2)),
}


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Write one picture as SVG, the same bytes at every run, and return its file.

    Args:
        name: one of `PICTURES`.
        folder: where to.
    """
    function, size = PICTURES[name]
    path = folder / f"{name}.svg"
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        function(axes)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path


def photograph_explain() -> None:
    """Write explain.png: the map that `megaopt explain --html` makes of the example GPT."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tools:
        page = Path(folder) / "explained.html"
        command = ["megaopt", "explain", "model:GPT", "--optimizer", "muon", "--html", str(page)]
        subprocess.run(command, cwd=FOLDER.parents[1] / "examples" / "nanogpt", check=True)
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1000, "height": 560})
        view.goto(page.as_uri())
        view.screenshot(path=FOLDER / "explain.png")
        browser.close()


if __name__ == "__main__":
    for each in PICTURES:
        draw(each)
    if "--explain" in sys.argv:
        photograph_explain()
