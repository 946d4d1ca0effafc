"""Placement: which pieces an optimizer keeps on the CPU, and where their step is made."""

from megaopt_device.placement.choice import nearest_share
from megaopt_device.placement.copies import Copies
from megaopt_device.placement.offload import Offload
from megaopt_device.placement.placed_params import PlacedParams
from megaopt_device.placement.state_on_cpu import StateOnCpu
from megaopt_device.placement.step_on_cpu import StepOnCpu

__all__ = ["Copies", "Offload", "PlacedParams", "StateOnCpu", "StepOnCpu", "nearest_share"]
