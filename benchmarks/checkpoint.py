"""Time and memory of a save, beside `torch.distributed.checkpoint.save` of the same bytes.

    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint.json

The model has the shapes of a GPT of 124 million parameters; with its Adam state that is 1.5 GB. Rounds of both are
interleaved, each writes to a path where its last checkpoint is, both sync their files. Memory is what the peak of
the process's resident memory rises by during a save, in a process of its own, and on each of two ranks of a sharded
optimizer.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.collected import collect_state

from megaopt_core import build_optimizer


def gpt(layers=12, width=768, vocabulary=50257, context=1024):
    """Return modules with GPT-2's shapes: 124 million parameters with the default arguments."""
    linear, norm = torch.nn.Linear, torch.nn.LayerNorm
    blocks = [
        torch.nn.ModuleList(
            [norm(width), linear(width, 3 * width), linear(width, width), norm(width),
             linear(width, 4 * width), linear(4 * width, width)]
        )
        for _ in range(layers)
    ]  # fmt: skip
    tables = [torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(context, width)]
    return torch.nn.ModuleList([*tables, *blocks, norm(width)])


def make(layers, sharding="replicated"):
    """Return a model and its optimizer, state filled."""
    model = gpt(layers, vocabulary=50257 if layers == 12 else 2000)
    optimizer = build_optimizer(model, "adam", lr=1e-3, sharding=sharding, clip_grad=0.0)
    for part in optimizer.parts:
        for state in part.inner.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].normal_()
    return model, optimizer


def resident(field):
    """Return a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def rise_of(action):
    """Return by how many bytes the peak of resident memory rises."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return max(resident("VmHWM") - before, 0)


def interleaved(rounds, folder, layers):
    """Return seconds of each round: ours, torch's, and loading."""
    model, optimizer = make(layers)
    tensors = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for param, name in optimizer.names.items():
        state = optimizer.state[param]
        tensors.update({f"optim.{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")})
    size = sum(tensor.nbytes for tensor in tensors.values())
    seconds = {"save_checkpoint": [], "dcp.save": [], "load_checkpoint": []}

    def timed(what, action):
        os.sync()
        start = time.perf_counter()
        action()
        seconds[what].append(time.perf_counter() - start)

    for round_ in range(rounds + 1):
        timed("save_checkpoint", lambda: save_checkpoint(folder / "ours", model, optimizer))
        timed("dcp.save", lambda: dcp.save(tensors, checkpoint_id=folder / "torchs", no_dist=True))
        if round_ == 0:
            for values in seconds.values():
                values.clear()  # the first round makes files
    timed("load_checkpoint", lambda: load_checkpoint(folder / "ours", model, optimizer))
    return size, {what: [round(value, 3) for value in values] for what, values in seconds.items()}


def memory(rank, size, folder, layers, sharding, answers):
    """Put the bytes of this rank's shard and the memory that a save added."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model, optimizer = make(layers, sharding)
    held = collect_state(optimizer).tensors
    shard = sum(t.local(i).nbytes for t in held.values() for i in range(len(t.chunks)))
    shard += sum(param.nbytes for param in model.parameters()) // size
    save_checkpoint(Path(folder) / "warm", model, optimizer)
    added = rise_of(lambda: save_checkpoint(Path(folder) / f"last{size}", model, optimizer))
    answers.put(
        {"rank": rank, "shard_bytes": shard, "added_bytes": added, "added_per_shard": round(added / shard, 4)}
    )


def measured_memory(folder, layers, size, sharding):
    """Return what :func:`memory` found on every rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = (size, str(folder), layers, sharding, answers)
    processes = [context.Process(target=memory, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return sorted(found, key=lambda entry: entry["rank"])


def main():
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="fewer make it quick")
    parser.add_argument(
        "--folder", default=None, help="where to write; the default is the system's temporary folder"
    )
    parser.add_argument("--out", default=None, help="JSON file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled|Detected an existing checkpoint")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        result = {
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "memory": {
                "replicated, 1 process": measured_memory(folder, options.layers, 1, "replicated"),
                "distributed, 2 ranks": measured_memory(folder, options.layers, 2, "distributed"),
            },
        }
        size, seconds = interleaved(options.rounds, folder, options.layers)
    finally:
        shutil.rmtree(folder)
    pairs = zip(seconds["save_checkpoint"], seconds["dcp.save"], strict=True)
    result.update(
        bytes=size,
        seconds=seconds,
        median_ratio=round(
            statistics.median(seconds["save_checkpoint"]) / statistics.median(seconds["dcp.save"]), 3
        ),
        ratios=[round(ours / torchs, 3) for ours, torchs in pairs],
    )
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(f"{text}\n")


if __name__ == "__main__":
    main()
