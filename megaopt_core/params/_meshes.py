"""The process groups of a model whose parameters are DTensors: their mesh names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.parallel._groups import MESH_DIMS, ProcessGroupCollection
from megaopt_core.params._parts import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["groups_of_model"]


def groups_of_model(chunks: Iterable[torch.nn.Module]) -> ProcessGroupCollection:
    """Return the process groups of a model for which nobody gave any.

    Of DTensors the largest mesh tells whose dimensions have names that :meth:`ProcessGroupCollection.from_device_mesh`
    knows; without one they are those of the default group.

    Args:
        chunks: the model chunks.
    """
    meshes = [mesh for mesh in _meshes_of(chunks) if mesh.mesh_dim_names and _is_known(mesh)]
    if not meshes:
        return ProcessGroupCollection.from_default()
    # Of equal ones that with more dimensions: it says more.
    return ProcessGroupCollection.from_device_mesh(max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim)))


def _is_known(mesh: DeviceMesh) -> bool:
    return all(name in MESH_DIMS for name in mesh.mesh_dim_names or ())


def _meshes_of(chunks: Iterable[torch.nn.Module]) -> Iterator[DeviceMesh]:
    seen: set[int] = set()
    for chunk in chunks:
        for param in chunk.parameters():
            if is_dtensor(param):
                mesh: Any = param.device_mesh  # type: ignore[attr-defined] # of DTensors
                if id(mesh) not in seen:
                    seen.add(id(mesh))
                    yield mesh
                    root = getattr(mesh, "_get_root_mesh", None)
                    if root is not None:
                        yield root()
