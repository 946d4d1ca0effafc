"""What a save or a load is given: of the right kinds, or an error says what to give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from megaopt_core.errors import ConfigurationError
from megaopt_core.params import chunks_of

if TYPE_CHECKING:
    from megaopt_core.routing import NameMap

__all__ = ["given_chunks", "name_of_chunk", "require_rename", "require_sides"]


def given_chunks(model: object) -> list[torch.nn.Module] | None:
    """Return the chunks of a model that a user gave; None where none is to be saved or loaded.

    Args:
        model: the model, its chunks, or None.

    Raises:
        ConfigurationError: it is something else.
    """
    return None if model is None else chunks_of(model)


def require_sides(scheduler: object, process_group: object, fqn: object, *, method: str) -> None:
    """Raise unless scheduler, group and names are what they should be.

    Args:
        scheduler: None, or an object with `method`.
        process_group: None, or a process group.
        fqn: None, or a function.
        method: what is called of a scheduler: `"state_dict"` or `"load_state_dict"`.

    Raises:
        ConfigurationError: one is something else.
    """
    is_one = callable(getattr(scheduler, method, None)) and not isinstance(scheduler, type)
    if scheduler is not None and not is_one:
        raise _wrong("scheduler", scheduler, f"give an object with {method}(), or None")
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise _wrong(
            "process_group", process_group, "give a torch.distributed.ProcessGroup, or None for everybody"
        )
    if fqn is not None and not callable(fqn):
        raise _wrong(
            "fqn", fqn, "give a function that takes a chunk index and a local name and returns a name"
        )


def require_rename(rename: object) -> None:
    """Raise unless names can be looked up in it.

    Args:
        rename: None, a mapping of names to names, or a function.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(rename, Mapping):
        wrong = [item for pair in rename.items() for item in pair if not isinstance(item, str)]
        if wrong:
            raise _wrong("rename", wrong[0], "give {name in the checkpoint: name here}")
    elif rename is not None and not callable(rename):
        raise _wrong(
            "rename", rename, "give {name in the checkpoint: name here}, or a function from one to the other"
        )


def name_of_chunk(fqn: NameMap | None, index: int, local: str) -> str:
    """Return the global name of a local one.

    Args:
        fqn: what the user gave for that; None: it stays.
        index: of the chunk.
        local: its name there.

    Raises:
        ConfigurationError: the function returned no name.
    """
    if fqn is None:
        return local
    name: object = fqn(index, local)
    if not isinstance(name, str):
        raise _wrong("fqn", name, f"for chunk {index} and {local!r} it must return a name")
    return name


def _wrong(what: str, given: Any, advice: str) -> ConfigurationError:
    shown = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    return ConfigurationError.got(what, given, advice, shown=shown)
