"""Models named on the command line: `module:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megaopt_core.errors import ConfigurationError

__all__ = ["build_model", "find_factory"]


def find_factory(target: str) -> Any:
    """Return what `module:name` or `file.py:name` names; modules are found from the working directory too.

    Args:
        target: the module or file, a colon, and a name inside, which may be dotted.

    Raises:
        ConfigurationError: there is no such module or name.
    """
    source, colon, path = target.rpartition(":")
    if not (colon and source and path):
        raise ConfigurationError(
            f"{target!r}: write it as module:factory or file.py:factory", setting="factory", value=target
        )
    found: Any = _import(source, target)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"{target!r}: {source} has no {path!r}", setting="factory", value=target)
        found = getattr(found, name)
    return found


def _import(source: str, target: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{target!r}: {source} cannot be imported ({type(error).__name__}: {error})",
            setting="factory",
            value=target,
        ) from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_model(target: str, device: str = "meta") -> list[torch.nn.Module]:
    """Return the model, or the chunks, that a factory makes.

    Args:
        target: `module:factory`; a function, a class, or a module that exists.
        device: where parameters are made; on `"meta"` they take no memory.

    Raises:
        ConfigurationError: it cannot be found, fails, or makes something else than modules.
    """
    factory = find_factory(target)
    made = factory
    if not isinstance(factory, torch.nn.Module):
        if not callable(factory):
            raise ConfigurationError(
                f"{target!r} is not callable: {factory!r}", setting="factory", value=target
            )
        try:
            with torch.device(device):
                made = factory()
        except (Exception, SystemExit) as error:
            hint = "; with --device cpu it may work" if device == "meta" else ""
            raise ConfigurationError(
                f"{target!r} failed on device {device} ({type(error).__name__}: {error}){hint}",
                setting="factory",
                value=target,
            ) from error
    chunks = list(made) if isinstance(made, (list, tuple)) else [made]
    if not (chunks and all(isinstance(chunk, torch.nn.Module) for chunk in chunks)):
        raise ConfigurationError(
            f"{target!r} returned {type(made).__name__}; it must return a torch.nn.Module or a list of them",
            setting="factory",
            value=target,
        )
    return chunks
