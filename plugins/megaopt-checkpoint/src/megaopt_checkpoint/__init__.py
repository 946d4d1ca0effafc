"""Checkpoints of models and optimizers as files, as a megaopt plugin."""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_checkpoint.convert import convert_checkpoint
    from megaopt_checkpoint.foreign import load_torch_state_dict
    from megaopt_checkpoint.group_map import dump_group_map
    from megaopt_checkpoint.load_report import LoadReport
    from megaopt_checkpoint.loading import load_checkpoint
    from megaopt_checkpoint.saving import save_checkpoint
    from megaopt_checkpoint.stateful import OptimizerCheckpointState
    from megaopt_checkpoint.values.chunks import Chunk
    from megaopt_checkpoint.values.encoding import decode, encode
    from megaopt_checkpoint.values.sliced import SlicedTensor
    from megaopt_checkpoint.verify import verify_checkpoint

__all__ = [
    "Chunk",
    "LoadReport",
    "OptimizerCheckpointState",
    "SlicedTensor",
    "convert_checkpoint",
    "decode",
    "dump_group_map",
    "encode",
    "load_checkpoint",
    "load_torch_state_dict",
    "save_checkpoint",
    "verify_checkpoint",
]

_HOME = {
    "Chunk": "values.chunks",
    "LoadReport": "load_report",
    "OptimizerCheckpointState": "stateful",
    "SlicedTensor": "values.sliced",
    "convert_checkpoint": "convert",
    "decode": "values.encoding",
    "dump_group_map": "group_map",
    "encode": "values.encoding",
    "load_checkpoint": "loading",
    "load_torch_state_dict": "foreign",
    "save_checkpoint": "saving",
    "verify_checkpoint": "verify",
}

if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
