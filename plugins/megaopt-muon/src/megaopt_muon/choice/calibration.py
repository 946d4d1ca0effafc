"""The file that keeps measured rates, so that all runs on a machine choose alike."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict

from megaopt_core.errors import ConfigurationError
from megaopt_muon.choice.onednn_share import probed_share
from megaopt_muon.choice.rates import DEFAULT, Rates, calibrated, probe, processor_kind

__all__ = [
    "VARIABLE",
    "calibration_path",
    "current_rates",
    "current_share",
    "nearest",
    "probed_rates",
    "stored_rates",
    "write_calibration",
]

VARIABLE = "MEGAOPT_CALIBRATION"
"""Environment variable that names the file."""

_FORMAT = 1


def calibration_path() -> Path:
    """Return where rates are stored: the file that `MEGAOPT_CALIBRATION` names, else one in the user's cache folder.

    Raises:
        ConfigurationError: none is named, and the user has no home.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    try:
        cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a container whose user nobody knows
        raise ConfigurationError(
            f"{VARIABLE} names no file, and there is no cache folder ({error}): name one, or set XDG_CACHE_HOME",
            setting=VARIABLE,
            value=None,
        ) from error
    return Path(cache_folder) / "megaopt" / "calibration.json"


def write_calibration(path: Path | None = None) -> Path:
    """Measure, add the result to the file, and return the file.

    What is there for other processors, numbers of threads and versions of torch stays.

    Args:
        path: of the file; None: :func:`calibration_path`.
    """
    path = path or calibration_path()
    if _may_be_there(path):
        _read(path)  # an error in it comes before a measurement
    measured = [asdict(rates) for rates in calibrated()]
    known = _read(path) if _may_be_there(path) else {}  # again: another process may have written meanwhile
    known[_key()] = measured
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"format": _FORMAT, "rates": known}, indent=2) + "\n")
    draft.replace(path)
    stored_rates_of.cache_clear()
    return path


def stored_rates() -> tuple[Rates, ...]:
    """Return the rates that are stored for this processor, number of threads and version of torch, if any.

    Raises:
        ConfigurationError: `MEGAOPT_CALIBRATION` names a file that cannot be read.
    """
    named = bool(os.environ.get(VARIABLE))
    try:
        path = calibration_path()
    except ConfigurationError:  # there is no place that one could be in
        return ()
    return stored_rates_of(path, _key(), named)


@cache
def stored_rates_of(path: Path, key: str, named: bool) -> tuple[Rates, ...]:
    """Return the rates that a file holds, read once.

    Args:
        path: the file.
        key: which processor, threads and torch.
        named: the user named the file: that it is missing, or broken, is an error; that it lacks the rates is said.

    Raises:
        ConfigurationError: the user named the file, and it cannot be read.
    """
    if not _may_be_there(path):
        if named:
            raise ConfigurationError.of(
                VARIABLE, str(path), f"there is no such file; `megaopt calibrate --output {path}` writes it"
            )
        return ()
    try:
        known = _read(path)
        if named and not known.get(key):
            _warn_of_others(path, key, known)
        return tuple(Rates(**rates) for rates in known.get(key, ()))
    except (ConfigurationError, TypeError) as error:
        if named:
            raise ConfigurationError.of(
                VARIABLE, str(path), f"not a calibration that `megaopt calibrate` wrote ({error})"
            ) from error
        warnings.warn(f"Muon does not use the calibration {path}: {error}", stacklevel=2)
        return ()


def _warn_of_others(path: Path, key: str, known: Mapping[str, Any]) -> None:
    """Say that a file that the user named has rates for other machines only."""
    has = f"only for {', '.join(map(repr, sorted(known)))}" if known else "nor any others"
    warnings.warn(
        f"{VARIABLE}={str(path)!r} has no rates for {key!r}, {has}: Muon uses measured or assumed rates; `megaopt "
        f"calibrate --output {path} --threads {torch.get_num_threads()}` adds them",
        stacklevel=4,
    )


def current_rates(small: int) -> Rates:
    """Return the rates for matrices of a size: the stored calibration's, else measured ones, else the assumed ones.

    Two runs choose alike where torch is to be deterministic, and ranks that train one model choose alike: there nothing
    is measured, and of several ranks a calibration is read only if `MEGAOPT_CALIBRATION` names it, for all of them.

    Args:
        small: the smaller dimension of the matrix.

    Raises:
        ConfigurationError: `MEGAOPT_CALIBRATION` names a file that cannot be read.
    """
    return _known(small) or probed_rates()


def current_share(small: int) -> float:
    """Return which part of the time of torch's own products in float32 oneDNN's take, on the same terms.

    Args:
        small: the smaller dimension of the matrix.

    Raises:
        ConfigurationError: `MEGAOPT_CALIBRATION` names a file that cannot be read.
    """
    known = _known(small)
    if known is not None and known.onednn is not None:
        return known.onednn
    return 1.0 if _are_to_be_alike() else probed_share(small)


def _known(small: int) -> Rates | None:
    """Return what is stored, or assumed where nothing may be measured; None where it is to be measured."""
    stored = stored_rates() if not _are_several() or os.environ.get(VARIABLE) else ()
    if stored:
        return nearest(stored, small)
    return DEFAULT if _are_to_be_alike() else None


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _are_to_be_alike() -> bool:
    """Return whether nothing may be measured."""
    return _are_several() or torch.are_deterministic_algorithms_enabled()


def nearest(known: Sequence[Rates], small: int) -> Rates:
    """Return the rates that were measured with matrices of the nearest size.

    Args:
        known: rates of several sizes; at least one.
        small: the smaller dimension of the matrix.
    """
    return min(known, key=lambda rates: abs(rates.size - small))


def probed_rates() -> Rates:
    """Measure in some milliseconds, once for this number of threads."""
    return _probed(torch.get_num_threads())


@cache
def _probed(threads: int) -> Rates:
    del threads  # the key: with another number, other rates
    return probe()


def _key() -> str:
    return f"{processor_kind()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _may_be_there(path: Path) -> bool:
    """Return whether there is a file, or something keeps this process from knowing: reading it says what."""
    try:
        return path.exists()
    except OSError:
        return True


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}", setting=VARIABLE, value=str(path)) from error
    rates = document.get("rates") if isinstance(document, dict) else None
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(rates, dict) or isinstance(version, bool) or version != _FORMAT:
        raise ConfigurationError(
            f"{path}: no calibration of format {_FORMAT}", setting=VARIABLE, value=str(path)
        )
    for key, measured in rates.items():
        if not isinstance(measured, list) or not all(isinstance(each, dict) for each in measured):
            raise ConfigurationError(
                f"{path}: {key!r} has no list of rates", setting=VARIABLE, value=str(path)
            )
    return rates
