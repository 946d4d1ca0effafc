"""Which name of the checkpoint belongs to which name here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import define, field

from megaopt_core.errors import CheckpointMismatchError, naming_user_function
from megaopt_core.params import shown

__all__ = ["NameTable", "Rename", "renamed"]

type Rename = Mapping[str, str] | Callable[[str], str]
"""`{name in the checkpoint: name here}`, or a function from the one to the other."""


@define
class NameTable:
    """Names here, to names in the checkpoint.

    Args:
        stored: name here to name in the checkpoint.
        aliases: further names here of tied tensors, to names in the checkpoint.
    """

    stored: dict[str, str] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)

    @classmethod
    def of(cls, names: Iterable[str], aliases: Mapping[str, str], rename: Rename | None) -> NameTable:
        """Return the table for a checkpoint's names.

        Args:
            names: all names in the checkpoint.
            aliases: names of tied tensors in it, to the name that they are stored under.
            rename: what the caller wants; None: every name stays.

        Raises:
            CheckpointMismatchError: a name to be renamed is not in the checkpoint, or two names become one.
        """
        names = list(dict.fromkeys(names))
        if isinstance(rename, Mapping):
            unknown = [name for name in rename if name not in names and name not in aliases]
            if unknown:
                raise CheckpointMismatchError(
                    f"rename: {shown(unknown)} is not in the checkpoint, which has {shown(names)}",
                    names=unknown,
                )
        table = cls()
        for name in names:
            here = renamed(name, rename)
            if here in table.stored:
                raise CheckpointMismatchError(
                    f"rename: {name!r} and {table.stored[here]!r} would both become {here!r}",
                    names=[name, table.stored[here]],
                )
            table.stored[here] = name
        for alias, name in aliases.items():
            table.aliases.setdefault(renamed(alias, rename), name)
        return table

    def find(self, name: str, among: Mapping[str, object]) -> str | None:
        """Return what a name here is called in the checkpoint, None when it is not there.

        Args:
            name: name here.
            among: what the checkpoint has, by its own names.
        """
        for table in (self.stored, self.aliases):
            if table.get(name) in among:
                return table[name]
        return None

    def renamed(self) -> dict[str, str]:
        """Return the names that differ: here, to in the checkpoint."""
        return {here: name for here, name in self.stored.items() if here != name}


def renamed(name: str, rename: Rename | None) -> str:
    """Return what a name of the checkpoint becomes.

    Args:
        name: in the checkpoint.
        rename: what the caller wants; None: every name stays.
    """
    if rename is None:
        return name
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    with naming_user_function("rename", f"({name!r})"):
        return rename(name)
