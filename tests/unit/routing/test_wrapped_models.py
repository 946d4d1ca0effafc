"""What the core asks of a wrapped model: only one whose gradients lie in buffers needs the plugin that checks them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megaopt_core import ProcessGroupCollection, build_optimizer
from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.sharding import BufferKey, PerBufferParamLayout

pytestmark = pytest.mark.any_python


class Wrapper(nn.Module):
    """The members of a wrapper, and what a test says of buffers."""

    process_groups = ProcessGroupCollection()
    scatters_grads = forward_waits = False

    def __init__(self, module: nn.Module, *, has_buffers: bool) -> None:
        super().__init__()
        self.module = module
        layout = PerBufferParamLayout({"module.weight": (0, 6)}, (6,), {"module.weight": 0})
        buffers = {BufferKey(torch.float32, torch.float32): layout} if has_buffers else {}
        self.full_param_layout = SimpleNamespace(routing=None, buffers=buffers)

    def finish_grad_sync(self) -> None:
        """Nothing is reduced."""

    finish_param_sync = zero_grad_buffer = finish_grad_sync


def test_buffers_need_the_plugin_that_checks_them(monkeypatch) -> None:
    """The error has its pip line; a wrapper without buffers is built without it."""
    monkeypatch.setitem(sys.modules, "megaopt_distributed", None)
    wrapped = Wrapper(nn.Linear(3, 2, bias=False), has_buffers=True)
    with pytest.raises(
        PluginNotInstalledError,
        match=r"^the check of buffers of Wrapper comes with megaopt-distributed, .*: pip install megaopt-distributed$",
    ):
        build_optimizer(wrapped, "plain", lr=0.1)
    build_optimizer(Wrapper(nn.Linear(3, 2, bias=False), has_buffers=False), "plain", lr=0.1)
