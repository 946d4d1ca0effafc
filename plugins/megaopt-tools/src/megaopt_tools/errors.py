"""What the commands refuse, in words for the person at the keyboard."""

from megaopt_core import MegaoptError

__all__ = ["CommandError", "StoppedError", "TextError"]


class CommandError(MegaoptError, ValueError):
    """The options of a command cannot be used as they are."""


class TextError(CommandError):
    """A text cannot be trained on.

    Attributes:
        source: the file, or the name of the built-in text.
    """

    def __init__(self, message: str, *, source: str) -> None:
        super().__init__(message)
        self.source = source


class StoppedError(MegaoptError):
    """Somebody pressed Ctrl-C.

    Attributes:
        steps: how many steps had been taken.
    """

    def __init__(self, message: str, *, steps: int) -> None:
        super().__init__(message)
        self.steps = steps
