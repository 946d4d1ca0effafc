"""One file in place of a folder: a torch file that `weights_only=True` loads, or safetensors."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import asdict, evolve

from megaopt_checkpoint.checksums import sum_of
from megaopt_checkpoint.files import sync_folder
from megaopt_checkpoint.folder import folder_path
from megaopt_checkpoint.memory import bytes_of
from megaopt_checkpoint.parsing import parse_manifest
from megaopt_checkpoint.sources import FileSource
from megaopt_checkpoint.staging import begin
from megaopt_checkpoint.stored import Manifest, StoredChunk, StoredTensor
from megaopt_checkpoint.strict_json import read_json
from megaopt_checkpoint.values.encoding import dtype_named
from megaopt_checkpoint.verify import check_files
from megaopt_checkpoint.writer import CheckpointWriter
from megaopt_checkpoint.writing import write_alone
from megaopt_core.config import dtype_name
from megaopt_core.errors import CheckpointCorruptError, CheckpointError

__all__ = ["consolidate", "convert_checkpoint", "expand"]

_MANIFEST = "megaopt"


def convert_checkpoint(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Turn a checkpoint into one file, or such a file into a checkpoint.

    Args:
        source: a checkpoint's folder, or a consolidated file.
        destination: what the other one will be; a file is torch's unless its name ends with `.safetensors`.

    Raises:
        CheckpointError: the source is neither, is damaged, or the destination cannot be written.
    """
    source, destination = folder_path(source), folder_path(destination)
    if source.is_dir():
        consolidate(source, destination)
    else:
        expand(source, destination)


def consolidate(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write a whole checkpoint into one file; all of it is in memory meanwhile.

    A torch file holds `{"model": {name: tensor}, "state": {key: tensor}, "megaopt": JSON}`.

    Args:
        path: the checkpoint's folder.
        file: where to write; an existing file is replaced in one move.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_checkpoint import save_checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last", model, build_optimizer(model, "adam", lr=1e-3))
        ...     consolidate(f"{folder}/last", f"{folder}/last.pt")
        ...     sorted(torch.load(f"{folder}/last.pt", weights_only=True)["model"])
        ['bias', 'weight']
    """
    with FileSource.open(path) as source:
        check_files(source.folder, source.manifest)
        tensors = {
            key: torch.empty(stored.shape, dtype=dtype_named(stored.dtype))
            for key, stored in source.manifest.tensors.items()
        }
        source.read(tensors.items())
    manifest = evolve(
        source.manifest,
        files={},
        tensors={key: _stored(tensor) for key, tensor in tensors.items()},
    )
    target = Path(os.path.abspath(file))  # noqa: PTH100 - resolve() would follow a link
    text = json.dumps(asdict(manifest), separators=(",", ":"))
    if target.suffix == ".safetensors":
        _safetensors()
    _replace(target, lambda temporary: _write(temporary, target.suffix, manifest, tensors, text))


def _stored(tensor: torch.Tensor) -> StoredTensor:
    shape, memory = tuple(tensor.shape), bytes_of(tensor)
    chunk = StoredChunk((0,) * len(shape), shape, "", 0, len(memory), sum_of(memory))
    return StoredTensor(dtype_name(tensor.dtype), shape, (chunk,))


def _write(
    file: Path, suffix: str, manifest: Manifest, tensors: Mapping[str, torch.Tensor], text: str
) -> None:
    if suffix == ".safetensors":
        _safetensors().save_file(dict(tensors), file, metadata={_MANIFEST: text})
        return
    model = {name: tensors[key] for name, key in manifest.model.get("tensors", {}).items()}
    known = set(manifest.model.get("tensors", {}).values())
    state = {key: tensor for key, tensor in tensors.items() if key not in known}
    torch.save({"model": model, "state": state, _MANIFEST: text}, file)


def _replace(target: Path, write: Any) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {target}: {error}", path=str(target)) from error


def expand(file: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a consolidated file as a checkpoint, which any world size loads.

    Args:
        file: what :func:`consolidate` wrote.
        path: the checkpoint's folder; an older checkpoint there is replaced.

    Raises:
        CheckpointError: the file is not a consolidated checkpoint, or is damaged.
    """
    text, tensors = _read(Path(file))
    manifest = parse_manifest(Path(file), read_json(text, Path(file)), in_one_file=True)
    for key, stored in manifest.tensors.items():
        tensor = tensors.get(key)
        if tensor is None or _stored(tensor.contiguous()) != stored:
            what = "is missing" if tensor is None else "differs from the written data"
            raise CheckpointCorruptError(f"{file}: {key} {what}", path=str(file))
    target = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link
    try:
        with ExitStack() as held:
            staging = begin(target, held)
            manifest = evolve(manifest, world_size=1)
            write_alone(dict(tensors), CheckpointWriter(staging.folder, 0, manifest, staging.commit))
            held.close()  # in here, where an interrupt still finds its way to it
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}", path=str(path)) from error


def _read(file: Path) -> tuple[str, dict[str, torch.Tensor]]:
    if not file.is_file():
        raise CheckpointError(f"there is no checkpoint and no file at {file}", path=str(file))
    not_ours = CheckpointError(
        f"{file} is not a consolidated checkpoint; optimizer states of plain torch training are taken over by "
        "megaopt_checkpoint.foreign.load_torch_state_dict",
        path=str(file),
    )
    if file.suffix == ".safetensors":
        opener = _safetensors().safe_open
        try:
            with opener(file, framework="pt") as opened:
                text = (opened.metadata() or {}).get(_MANIFEST)
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
        except Exception as error:
            raise CheckpointError(
                f"{file} cannot be read as a safetensors file: {_first_line(error)}", path=str(file)
            ) from error
        if text is None:
            raise not_ours
        return text, tensors
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read as a torch file of plain tensors: {_first_line(error)}",
            path=str(file),
        ) from error
    if not isinstance(held, dict) or not isinstance(held.get(_MANIFEST), str):
        raise not_ours
    model, state = held.get("model"), held.get("state")
    if not isinstance(model, dict) or not isinstance(state, dict):
        raise not_ours
    tensors = {**{f"model.{name}": tensor for name, tensor in model.items()}, **state}
    return held[_MANIFEST], {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError("safetensors is not installed: pip install safetensors") from error
