"""How state dicts of torch's schema show states that ranks share, and take them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["SharedState"]


class SharedState(Protocol):
    """The states of one optimizer whose ranks share them out, as its state dicts show and take them.

    All ranks of the optimizer call each method, or none: it may communicate.
    """

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the state of every parameter, by name, that `state_dict()["state"]` has on this rank."""

    def load(self, state_dict: Mapping[str, Any], names: Sequence[str], *, strict: bool) -> set[str]:
        """Copy a state dict into the optimizer, after all of it has been checked on all ranks.

        Args:
            state_dict: of torch's schema; it is not changed.
            names: of its parameters, in the order of its groups.
            strict: names must be the same on both sides, and every state that is here must be there.

        Returns:
            The parameters whose state has been loaded without a main value: theirs starts from the model's.

        Raises:
            MegaoptError: it does not fit; nothing has been changed on any rank.
        """
