"""State by parameter name: enumerated, sliced, matched, restored, whoever stores the bytes."""

from megaopt_core.state._collected import Collected, collect_state
from megaopt_core.state._document import (
    describe_optimizer,
    optimizer_names,
    plugins_of,
    require_own_names,
    versions,
)
from megaopt_core.state._manifest import (
    CHECKSUMS,
    Manifest,
    StoredChunk,
    StoredTensor,
    require_format,
)
from megaopt_core.state._pieces import OwnedState, PieceState, piece_states
from megaopt_core.state._protocol import NamedPieces, NamedState
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._restore.fitting import (
    load_or_restore,
    named_errors,
    require_same_shapes,
    require_tensors,
)
from megaopt_core.state._restore.group_settings import GroupMerge
from megaopt_core.state._restore.matching import LoadedBeside, Matching
from megaopt_core.state._restore.plan import LoadPlan, Restore, plan_load
from megaopt_core.state._sources import MemorySource, Request, Source, read_values
from megaopt_core.state._stateful import OptimizerCheckpointState
from megaopt_core.state._torch_schema.source import names_in, torch_source
from megaopt_core.state._values.chunks import Chunk
from megaopt_core.state._values.encoding import decode, dtype_named, encode
from megaopt_core.state._values.sliced import SlicedTensor, sliced

__all__ = [
    "CHECKSUMS",
    "Chunk",
    "Collected",
    "GroupMerge",
    "LoadPlan",
    "LoadedBeside",
    "Manifest",
    "Matching",
    "MemorySource",
    "NamedPieces",
    "NamedState",
    "OptimizerCheckpointState",
    "OwnedState",
    "PieceState",
    "Ranks",
    "Request",
    "Restore",
    "SlicedTensor",
    "Source",
    "StoredChunk",
    "StoredTensor",
    "collect_state",
    "decode",
    "describe_optimizer",
    "dtype_named",
    "encode",
    "load_or_restore",
    "named_errors",
    "names_in",
    "optimizer_names",
    "piece_states",
    "plan_load",
    "plugins_of",
    "read_values",
    "require_format",
    "require_own_names",
    "require_same_shapes",
    "require_tensors",
    "sliced",
    "torch_source",
    "versions",
]
