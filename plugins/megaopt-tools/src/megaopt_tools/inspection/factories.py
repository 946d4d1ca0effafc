"""Models and batches named on the command line: `module:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megaopt_core.errors import ConfigurationError

__all__ = ["build_model", "make_example"]

_OF_TENSORS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
_OF_INIT = ("kaiming_normal", "kaiming_uniform", "orthogonal", "sparse", "xavier_normal", "xavier_uniform")
# Older versions of torch do not hand over trunc_normal_ as a whole.
_TRUNCATED = ("trunc_normal", "clamp", "erfinv")

_RANDOM = frozenset(f"{name}_" for name in (*_OF_TENSORS, *_OF_INIT, *_TRUNCATED))
"""Functions that fill a tensor with random numbers, of `torch.nn.init` and of tensors."""


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves tensors on the meta device unfilled: torch's decompositions there import a compiler, for seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        if (
            func in (torch.rand, torch.randn)
            and torch.device(kwargs.get("device") or torch.get_default_device()).type == "meta"
        ):
            return torch.empty(*args, **{key: value for key, value in kwargs.items() if key != "generator"})
        return func(*args, **kwargs)


def _refused(target: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{target!r}{why}", setting="factory", value=target)


def _find_factory(target: str) -> Any:
    """Return what `module:name` or `file.py:name` names; modules are found from the working directory too."""
    source, colon, path = target.rpartition(":")
    if not (colon and source and path):
        raise _refused(target, ": write it as module:factory or file.py:factory")
    found: Any = _import(source, target)
    for name in path.split("."):
        if not hasattr(found, name):
            raise _refused(target, f": {source} has no {path!r}")
        found = getattr(found, name)
    return found


def _import(source: str, target: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except SystemExit as error:
        remedy = 'put what trains under `if __name__ == "__main__":`'
        raise _refused(
            target, f": {source} runs as a script when it is imported, and exits; {remedy}"
        ) from error
    except Exception as error:
        raise _refused(target, f": {source} cannot be imported ({type(error).__name__}: {error})") from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _require_no_arguments(factory: Any, target: str) -> None:
    """Raise if a factory cannot be called without arguments."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable that does not tell
        return
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.kind not in rest and p.default is inspect.Parameter.empty]
    if needed:
        name = target.rpartition(":")[2]
        raise _refused(
            target,
            f" needs arguments ({', '.join(needed)}), and is called without any; name a function that takes none, "
            f"such as `def build(): return {name}({', '.join(f'{one}=...' for one in needed)})`",
        )


def _made_by(target: str, factory: Any, device: str) -> Any:
    """Return what a factory makes on a device."""
    if not callable(factory):
        raise _refused(target, f" is not callable: {factory!r}")
    _require_no_arguments(factory, target)
    try:
        with torch.device(device), _NoRandomNumbers():
            return factory()
    except (Exception, SystemExit) as error:
        hint = "; with --device cpu it may work" if device == "meta" else ""
        why = f" failed on device {device} ({type(error).__name__}: {error}){hint}"
        raise _refused(target, why) from error


def build_model(target: str, device: str = "meta") -> list[torch.nn.Module]:
    """Return the model, or the chunks, that a factory makes.

    Args:
        target: `module:factory`; a function, a class, or a module that exists.
        device: where parameters are made; on `"meta"` they take no memory.

    Raises:
        ConfigurationError: it cannot be found, fails, or makes something else than modules.
    """
    found = _find_factory(target)
    made = found if isinstance(found, torch.nn.Module) else _made_by(target, found, device)
    chunks = list(made) if isinstance(made, (list, tuple)) else [made]
    if not (chunks and all(isinstance(chunk, torch.nn.Module) for chunk in chunks)):
        raise _refused(
            target, f" returned {type(made).__name__}; it must return a torch.nn.Module or a list of them"
        )
    return chunks


def make_example(target: str, device: str) -> Any:
    """Return the batch that a factory makes: a tensor, a tuple of arguments or a mapping of keyword arguments.

    Args:
        target: `module:factory`; a function, or a batch that exists.
        device: where it is made; for a model on `"meta"` on the CPU, with values.

    Raises:
        ConfigurationError: it cannot be found, fails, or makes something else.
    """
    found = _find_factory(target)
    kinds = (torch.Tensor, tuple, list, Mapping)
    made = (
        found if isinstance(found, kinds) else _made_by(target, found, "cpu" if device == "meta" else device)
    )
    if not isinstance(made, kinds):
        raise _refused(
            target,
            f" returned {type(made).__name__}; it must return a tensor, a tuple of arguments or a mapping of them",
        )
    return made
