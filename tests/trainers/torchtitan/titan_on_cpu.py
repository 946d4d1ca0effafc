"""Sets aside what torchtitan asks of an accelerator, so that its own Trainer runs on CPUs over gloo.

Imported before torchtitan. Nothing of its optimizers, schedulers, checkpoints or parallelisms is touched.
"""

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

# torchtitan takes "cuda" where it finds no accelerator.
torch._utils._get_available_device_type = lambda: "cpu"
cpu: Any = torch.cpu
cpu.get_device_name = lambda *_: "cpu"
cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=8 << 30)
cpu.memory_stats = lambda *_: {}
cpu.device_count = lambda: 1
cpu.current_device = lambda: 0
for name in ("reset_peak_memory_stats", "empty_cache", "set_device"):
    setattr(cpu, name, lambda *_: None)

_barrier = dist.barrier
# gloo takes no device_ids.
dist.barrier = lambda *args, **kwargs: _barrier(
    *args, **{key: value for key, value in kwargs.items() if key != "device_ids"}
)


def _exchanged(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
    """Exchange chunks of unequal sizes, which gloo's own `all_to_all` refuses."""
    sent, came = (torch.cat([chunk.flatten() for chunk in chunks]) for chunks in (inputs, outputs))
    sizes = ([chunk.numel() for chunk in chunks] for chunks in (outputs, inputs))
    dist.all_to_all_single(came, sent, *sizes, group=group)
    for chunk, values in zip(outputs, came.split([chunk.numel() for chunk in outputs]), strict=True):
        chunk.copy_(values.view_as(chunk))


dist.all_to_all = _exchanged

from torchtitan import trainer  # noqa: E402 - after what it looks at when it is imported
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.tools import utils as tools  # noqa: E402

_undivided = fsdp.disable_fsdp_gradient_division


def _summed(model: torch.nn.Module) -> None:
    """Add gradients up as they are: gloo has no scaled sum."""
    _undivided(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(enable=True)


fsdp.disable_fsdp_gradient_division = _summed
tools.get_local_device = distributed.get_local_device = trainer.utils.get_local_device = lambda: torch.device(
    "cpu"
)
distributed.set_pg_timeouts = lambda **_: None  # gloo has none to set
trainer.time = SimpleNamespace(sleep=lambda _: None, perf_counter=trainer.time.perf_counter)
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
