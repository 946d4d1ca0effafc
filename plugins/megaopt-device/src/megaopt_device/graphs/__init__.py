"""Graphs: the inner step as one that a device replays without the host."""

from megaopt_device.graphs.capture import Capture, CudaCapture
from megaopt_device.graphs.captured_step import CapturedStep

__all__ = ["Capture", "CapturedStep", "CudaCapture"]
