"""Whether an optimizer still steps exactly the parameters of its model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from attrs import field, frozen

from megaopt_core.params._names import named_params
from megaopt_core.sharding._wrapped import WrappedModel, known_wrappers, wrappers_of

__all__ = ["NamedChunk", "WatchedModel"]

type _Names = Callable[[int, str], str] | None

type NamedChunk = tuple[Callable[[str], str], torch.nn.Module]
"""What makes a local name of a model chunk a global one, and the chunk."""


def _references(chunks: Sequence[torch.nn.Module]) -> tuple[weakref.ref[torch.nn.Module], ...]:
    return tuple(weakref.ref(chunk) for chunk in chunks)


@frozen(eq=False)
class WatchedModel:
    """The model that an optimizer was built for; it is not kept alive.

    Args:
        chunks: the model's chunks.
        fqn: maps `(chunk index, local name)` to a globally unique name.
        excluded: names of parameters that something else steps.
    """

    chunks: tuple[weakref.ref[torch.nn.Module], ...] = field(default=(), converter=_references)
    fqn: _Names = None
    excluded: frozenset[str] = frozenset()

    def named_chunks(self) -> list[NamedChunk]:
        """Return the chunks that are alive, each with what makes its names global."""
        present = ((index, reference()) for index, reference in enumerate(self.chunks))
        return [(partial(self._global, index), chunk) for index, chunk in present if chunk is not None]

    def _global(self, index: int, name: str) -> str:
        return name if self.fqn is None else self.fqn(index, name)

    def called(self, names: Mapping[torch.nn.Parameter, str]) -> dict[str, str]:
        """Return canonical names by every name that parameters have in their chunk, but for what is ambiguous.

        Args:
            names: model parameter to canonical name.
        """
        found: dict[str, set[str]] = {}
        for entry in (entry for chunk in self.alive() for entry in named_params(chunk)):
            owned = {names[twin] for twin in (entry.param, *entry.twins) if twin in names}
            for local in (entry.name, *entry.aliases) if owned else ():
                found.setdefault(local, set()).update(owned)
        return {local: min(owned) for local, owned in found.items() if len(owned) == 1}

    def alive(self) -> list[torch.nn.Module]:
        """Return the chunks that are alive."""
        return [chunk for reference in self.chunks if (chunk := reference()) is not None]

    def zero_grad_buffers(self) -> tuple[bool, list[WrappedModel]]:
        """Fill the gradient buffers of wrapped chunks with zeros.

        A wrapper that has parameters of others too is left out: an optimizer zeroes what it steps.

        Returns:
            True when every chunk is a wrapper: all `main_grad`s are zero now. And the wrappers whose buffers were
            filled.
        """
        chunks = [reference() for reference in self.chunks]
        found = [(chunk, wrapper) for chunk in chunks for wrapper in known_wrappers(chunk)]
        zeroed = {id(one.wrapper): one.wrapper for _, one in found if one.is_covered}
        for wrapper in zeroed.values():
            wrapper.zero_grad_buffer()
        themselves = {id(one.wrapper) for _, one in found}
        return bool(chunks) and themselves.issuperset(map(id, chunks)), list(zeroed.values())

    def finish_param_sync(self) -> None:
        """Wait until parameters that are still being gathered after a step have arrived."""
        for wrapper in wrappers_of(self.alive()):
            wrapper.finish_param_sync()

    def problems(
        self, names: Mapping[torch.nn.Parameter, str], chunks: Sequence[torch.nn.Module] | None = None
    ) -> tuple[str, ...]:
        """Return what has changed since the optimizer was built, in words; empty when nothing has.

        Args:
            names: the parameters that the optimizer steps.
            chunks: the model as it is now; None: the chunks of the build, as far as they are alive.
        """
        present = self.alive() if chunks is None else list(chunks)
        if not present:
            return ()
        found: list[str] = []
        seen: set[torch.nn.Parameter] = set()
        for index, chunk in enumerate(present):
            for entry in named_params(chunk):
                name, *aliases = (self._global(index, local) for local in (entry.name, *entry.aliases))
                owned = {twin: names[twin] for twin in (entry.param, *entry.twins) if twin in names}
                seen.update(owned)
                if name not in self.excluded:
                    found += _problems_of(entry.param, name, aliases, owned, names)
        found += [
            f"{name!r} is stepped, but no longer in the model"
            for param, name in names.items()
            if param not in seen
        ]
        return tuple(found)


def _problems_of(
    param: torch.nn.Parameter,
    name: str,
    aliases: Sequence[str],
    owned: Mapping[torch.nn.Parameter, str],
    names: Mapping[torch.nn.Parameter, str],
) -> list[str]:
    found = []
    if len(owned) > 1:
        found.append(
            f"{' and '.join(map(repr, owned.values()))} share one memory now and would be stepped twice"
        )
    replaced = [
        alias for alias in (name, *aliases) if alias in set(names.values()) and alias not in owned.values()
    ]
    if replaced and owned:
        found.append(
            f"{', '.join(map(repr, replaced))} was tied to {next(iter(owned.values()))!r} after the build"
        )
    if param.requires_grad and not owned:
        found.append(
            f"{name!r} trains, but nothing steps it: it was added, replaced or unfrozen after the build"
        )
    if not param.requires_grad and owned:
        found.append(f"{name!r} was frozen after the build; without a gradient it is left alone")
    return found
