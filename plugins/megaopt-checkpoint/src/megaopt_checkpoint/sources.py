"""Where state is loaded from: a checkpoint's files, or tensors in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Self

from attrs import frozen
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megaopt_checkpoint.folder import MOST_OPEN, HeldFolder, folder_path
from megaopt_checkpoint.manifest import manifest_in
from megaopt_checkpoint.reader import CheckpointReader
from megaopt_checkpoint.restore.source import Request
from megaopt_checkpoint.staging import recover
from megaopt_checkpoint.stored import Manifest, StoredTensor
from megaopt_checkpoint.verify import require_files
from megaopt_core.errors import CheckpointCorruptError, CheckpointError

__all__ = ["FileSource"]


_TRIES = 20
"""How often a checkpoint may be replaced in the moment between finding its folder and opening its files."""


@frozen(eq=False)
class FileSource:
    """A checkpoint on the disk, for the time of a `with` block: all that is read is of one save.

    Args:
        folder: its folder, held.
        manifest: its manifest.
        verify: check the checksum of what is read whole, while it is read.
    """

    folder: HeldFolder
    manifest: Manifest
    verify: bool = True

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Self:
        """Open a checkpoint and read its manifest; another process may replace it from then on.

        Args:
            path: its folder.
            verify: check the checksum of what is read whole, while it is read.

        Raises:
            CheckpointError: there is none, it is too new, or it is damaged.
        """
        place = folder_path(path)
        recover(place)
        for left in reversed(range(_TRIES)):
            folder = HeldFolder(place)
            try:
                manifest = manifest_in(folder)
                if len(manifest.files) <= MOST_OPEN:
                    require_files(folder, manifest)
            except CheckpointError:
                replaced = not folder.is_current
                folder.close()
                if left and replaced:
                    continue
                raise
            return cls(folder, manifest, verify)
        raise AssertionError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.close()

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder.path)

    def stored(self, key: str) -> StoredTensor:
        """Return shape, dtype and boxes of a tensor.

        Args:
            key: its key.

        Raises:
            CheckpointCorruptError: the manifest refers to a tensor that it does not have.
        """
        found = self.manifest.tensors.get(key)
        if found is None:
            raise CheckpointCorruptError(
                f"{self.name} refers to {key!r} but does not hold it", path=self.name
            )
        return found

    def read(self, requests: Iterable[Request]) -> None:
        """Read tensors into their places.

        Args:
            requests: `(key, place)` pairs; a key may come more than once.
        """
        rounds: list[dict[str, Any]] = []
        for key, place in requests:
            free = next((places for places in rounds if key not in places), None)
            if free is None:
                free = {}
                rounds.append(free)
            free[key] = place
        for places in rounds:
            reader = CheckpointReader(self.folder, self.manifest, verify=self.verify)
            plans = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            plans.set_up_planner(places, reader.read_metadata(), is_coordinator=True)
            reader.read_data(plans.finish_plan(plans.create_local_plan()), plans).wait()
