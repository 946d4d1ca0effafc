"""State by parameter name: what is kept, who steps it, and torch's plain state dict."""

from megaopt_core.state._fitting import (
    load_or_restore,
    misfit,
    mismatch,
    named_errors,
    number_kind,
    require_names,
    require_same_shapes,
    require_settings,
)
from megaopt_core.state._group_settings import GroupMerge, equal_settings, merge_groups
from megaopt_core.state._left_out import require_state, with_left_out
from megaopt_core.state._listed import (
    fresh_in,
    is_left_out,
    is_written,
    names_in,
    origin_in,
    origin_of,
    require_told,
    told_at,
)
from megaopt_core.state._named import NamedState, StateSlice
from megaopt_core.state._notes import joins_of
from megaopt_core.state._origin import (
    described_view,
    optimizer_names,
    plugins_of,
    readers_of,
    settings_of,
    stepped_otherwise,
    stored_view,
)
from megaopt_core.state._pieces import OwnedState, PieceState, is_number, piece_states, states_of
from megaopt_core.state._protocol import NamedPieces, StatefulOptimizer

__all__ = [
    "GroupMerge",
    "NamedPieces",
    "NamedState",
    "OwnedState",
    "PieceState",
    "StateSlice",
    "StatefulOptimizer",
    "described_view",
    "equal_settings",
    "fresh_in",
    "is_left_out",
    "is_number",
    "is_written",
    "joins_of",
    "load_or_restore",
    "merge_groups",
    "misfit",
    "mismatch",
    "named_errors",
    "names_in",
    "number_kind",
    "optimizer_names",
    "origin_in",
    "origin_of",
    "piece_states",
    "plugins_of",
    "readers_of",
    "require_names",
    "require_same_shapes",
    "require_settings",
    "require_state",
    "require_told",
    "settings_of",
    "states_of",
    "stepped_otherwise",
    "stored_view",
    "told_at",
    "with_left_out",
]
