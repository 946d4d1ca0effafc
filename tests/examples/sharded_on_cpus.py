"""Runs a script in which accelerate shards on CPUs too; by itself it does so where there is an accelerator."""

import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def shard_everywhere() -> None:
    """Let the settings of FSDP decide alone, as they do on accelerators."""
    made = AcceleratorState.__init__

    def with_sharding(self: AcceleratorState, *given: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        made(self, *given, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if getattr(self, "fsdp_plugin", None) is not None:  # whoever asks for the state makes it anew
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = with_sharding


if __name__ == "__main__":
    shard_everywhere()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
