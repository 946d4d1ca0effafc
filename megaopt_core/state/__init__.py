"""State by parameter name: enumerated, sliced, matched, restored, whoever stores the bytes."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.state._document import describe_optimizer, optimizer_names, plugins_of, versions
    from megaopt_core.state._manifest import FORMAT_VERSION, Manifest, StoredChunk, StoredTensor
    from megaopt_core.state._model import ModelTensors, collect_model, finish_param_sync, require_pair
    from megaopt_core.state._pieces import Collected, collect_state, is_elementwise, state_key
    from megaopt_core.state._ranks import Ranks
    from megaopt_core.state._restore.load_report import LoadReport
    from megaopt_core.state._restore.matching import match
    from megaopt_core.state._restore.plan import LoadPlan, plan_load, plan_optimizer
    from megaopt_core.state._restore.renaming import Rename, renamed
    from megaopt_core.state._shown import shown
    from megaopt_core.state._sources import MemorySource, Request, Source, read_values
    from megaopt_core.state._stateful import OptimizerCheckpointState
    from megaopt_core.state._values.chunks import Chunk
    from megaopt_core.state._values.codes import with_named_codes
    from megaopt_core.state._values.encoding import decode, dtype_named, encode, name_of_dtype
    from megaopt_core.state._values.sliced import SlicedTensor
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "FORMAT_VERSION": "_manifest",
            "require_pair": "_model",
            "Chunk": "_values.chunks",
            "Collected": "_pieces",
            "LoadPlan": "_restore.plan",
            "LoadReport": "_restore.load_report",
            "Manifest": "_manifest",
            "MemorySource": "_sources",
            "ModelTensors": "_model",
            "OptimizerCheckpointState": "_stateful",
            "Ranks": "_ranks",
            "Rename": "_restore.renaming",
            "Request": "_sources",
            "SlicedTensor": "_values.sliced",
            "Source": "_sources",
            "StoredChunk": "_manifest",
            "StoredTensor": "_manifest",
            "collect_model": "_model",
            "collect_state": "_pieces",
            "decode": "_values.encoding",
            "describe_optimizer": "_document",
            "dtype_named": "_values.encoding",
            "encode": "_values.encoding",
            "finish_param_sync": "_model",
            "is_elementwise": "_pieces",
            "match": "_restore.matching",
            "name_of_dtype": "_values.encoding",
            "optimizer_names": "_document",
            "plan_load": "_restore.plan",
            "plan_optimizer": "_restore.plan",
            "plugins_of": "_document",
            "read_values": "_sources",
            "renamed": "_restore.renaming",
            "shown": "_shown",
            "state_key": "_pieces",
            "versions": "_document",
            "with_named_codes": "_values.codes",
        },
    )

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "Collected",
    "LoadPlan",
    "LoadReport",
    "Manifest",
    "MemorySource",
    "ModelTensors",
    "OptimizerCheckpointState",
    "Ranks",
    "Rename",
    "Request",
    "SlicedTensor",
    "Source",
    "StoredChunk",
    "StoredTensor",
    "collect_model",
    "collect_state",
    "decode",
    "describe_optimizer",
    "dtype_named",
    "encode",
    "finish_param_sync",
    "is_elementwise",
    "match",
    "name_of_dtype",
    "optimizer_names",
    "plan_load",
    "plan_optimizer",
    "plugins_of",
    "read_values",
    "renamed",
    "require_pair",
    "shown",
    "state_key",
    "versions",
    "with_named_codes",
]
