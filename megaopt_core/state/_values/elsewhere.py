"""What stands in a state dict for the state of a parameter that other ranks step."""

from __future__ import annotations

from typing import Any, NoReturn

from megaopt_core.errors import UnsupportedOperationError

__all__ = ["StateOfOtherRanks"]


class StateOfOtherRanks(dict[str, Any]):
    """A state of which this rank has nothing: without what other ranks keep, a file would be taken for the whole.

    It cannot be pickled. Copies in memory are the same object, so that a copy of a state dict loads where it was made.
    """

    def __copy__(self) -> StateOfOtherRanks:
        """Return itself."""
        return self

    def __deepcopy__(self, memo: Any) -> StateOfOtherRanks:
        """Return itself.

        Args:
            memo: what has been copied already.
        """
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse."""
        raise UnsupportedOperationError(
            "a state dict of one rank cannot be pickled: other ranks keep the state of some of its parameters. Use "
            "save_checkpoint() and load_checkpoint(), or torch.distributed.checkpoint, also with torch's "
            "get_optimizer_state_dict(): each shard is saved once, and loads on any number of ranks"
        )
