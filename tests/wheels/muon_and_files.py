"""Trains, saves files and resumes with the core, Muon and megaopt-checkpoint alone, in an empty environment."""

import sys
import tempfile
from importlib.metadata import distributions

import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint

from megaopt_core import build_optimizer

FIVE = {"megaopt-core", "megaopt-adam", "megaopt-muon", "megaopt-roles", "megaopt-checkpoint"}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    """Step a few times, each with a batch of its own."""
    for seed in seeds:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Train, save, and go on in a new run as in the old one."""
    ours = {each.metadata["Name"] for each in distributions() if each.metadata["Name"].startswith("megaopt")}
    if ours != FIVE:
        sys.exit(f"{ours} are installed, not {FIVE}")
    runs = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        runs.append((model, build_optimizer(model, "muon", lr=1e-2)))
    train(*runs[0], range(3))
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/last", *runs[0])
        load_checkpoint(f"{folder}/last", *runs[1])
    for run in runs:
        train(*run, range(3, 6))
    if not all(map(torch.equal, runs[0][0].parameters(), runs[1][0].parameters())):
        sys.exit("a run that was resumed goes on otherwise")
    print("core, Muon and checkpoints alone: saved, resumed")


if __name__ == "__main__":
    main()
