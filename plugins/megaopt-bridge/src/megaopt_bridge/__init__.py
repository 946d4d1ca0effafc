"""Optimizers of other packages for megaopt: any class by its name, through one generated entry.

Example:
    >>> import torch
    >>> from megaopt_core import build_optimizer
    >>> optimizer = build_optimizer(torch.nn.Linear(4, 2), "torch:NAdam", lr=1e-3, momentum_decay=2e-3)
    >>> optimizer.param_groups[0]["momentum_decay"]
    0.002
"""

from megaopt_bridge.entry import bridged_entry
from megaopt_bridge.names import SOURCES, BridgedName, Source
from megaopt_bridge.probing import Probe, probe
from megaopt_bridge.recipe import Recipe

__all__ = ["SOURCES", "BridgedName", "Probe", "Recipe", "Source", "bridged_entry", "probe"]
