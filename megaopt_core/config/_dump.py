"""Writing down what a run was configured with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaopt_core.errors import ConfigurationError
from megaopt_core.parallel._meeting import this_rank

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig

__all__ = ["CONFIG_FILE", "dump_config"]

CONFIG_FILE = "optimizer_config.json"


def dump_config(config: OptimizerConfig) -> None:
    """Write a configuration to `optimizer_config.json`, which `OptimizerConfig.from_dict` reads; rank 0 writes.

    Nothing is written where its `config_logger_dir` is empty. The file is replaced as a whole: a reader never sees half
    of one.

    Args:
        config: the run's configuration.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """
    folder = config.config_logger_dir
    if not folder or this_rank() != 0:
        return
    target = Path(folder) / CONFIG_FILE
    text = json.dumps({"torch": torch.__version__, "config": config.to_dict()}, indent=2, default=repr)
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n")
        partial.replace(target)
    except (OSError, ValueError) as error:  # of a path that no file can have, too
        raise ConfigurationError.of("config_logger_dir", folder, f"cannot be written to ({error})") from error
