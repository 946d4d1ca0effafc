"""The routing that a checkpoint holds, for whoever builds its optimizer again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaopt_checkpoint.manifest import read_manifest
from megaopt_checkpoint.schema import matrix_view
from megaopt_checkpoint.staging import recover
from megaopt_core.errors import CheckpointError
from megaopt_core.params import Role
from megaopt_core.plugin_api import StoredParam, StoredRouting

__all__ = ["stored_routing"]


def stored_routing(path: str | os.PathLike[str]) -> StoredRouting | None:
    """Return which optimizer stepped every parameter when a checkpoint was saved, and what each parameter was.

    Args:
        path: the checkpoint's folder.

    Returns:
        The routing; None where there is no folder: another plugin may read it.

    Raises:
        CheckpointError: what is there is no checkpoint, is damaged, or was saved without an optimizer.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link that is refused
    try:
        recover(place)
        is_folder = place.is_dir()
    except OSError:  # a name that no folder can have
        is_folder = False
    if not is_folder:
        return None
    manifest = read_manifest(place)
    if manifest.optimizer is None:
        raise CheckpointError(f"{place} was saved without an optimizer: it holds no routing", path=str(place))
    return StoredRouting(
        str(place),
        {name: _stored_param(described) for name, described in manifest.parameters.items()},
        readers=manifest.written.get("roles", ""),
        plugins=manifest.plugins,
    )


def _stored_param(described: Mapping[str, Any]) -> StoredParam:
    role, view = described.get("role"), described.get("view")
    return StoredParam(
        described["optimizer"],
        None if role is None else Role(role),
        None if view is None else matrix_view(view),
        () if view is None else tuple(view["shape"]),
    )
