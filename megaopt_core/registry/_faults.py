"""What plugins do wrong, in words that can always be shown, and imports that take too long."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SLOW_SECONDS", "loading", "traceback_of", "words_of"]

SLOW_SECONDS = 20.0
"""After so many seconds a line on stderr names the plugin that is still being loaded."""


def words_of(error: BaseException) -> str:
    """Return class and message of anything that a plugin raised; its `str()` may raise too.

    Args:
        error: what it raised.

    Example:
        >>> words_of(ValueError("no such device"))
        'ValueError: no such device'
    """
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as unspeakable:  # noqa: BLE001 - the message of a stranger's exception is a stranger's code
        return f"{kind} (its message cannot be shown: str() raised {type(unspeakable).__name__})"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of anything that a plugin raised, as text.

    Args:
        error: what it raised.
    """
    try:
        return "".join(traceback.format_exception(error))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - as above
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{words_of(error)}\n"


@contextmanager
def loading(plugin: str, name: str) -> Iterator[None]:
    """Keep what a plugin does while it is loaded from the user's program.

    A line on stderr names it if it takes longer than `SLOW_SECONDS`; filters of warnings that it sets end with
    the block; and a process that it forks off ends too, for it would run the user's program a second time.

    Args:
        plugin: who is loaded, in words.
        name: the name by which it is left out.
    """
    seconds = SLOW_SECONDS
    words = (
        f"megaopt: {plugin} has been loading for more than {seconds:g} seconds; "
        f"the environment variable MEGAOPT_DISABLE_PLUGINS={name} leaves it out\n"
    )
    timer = threading.Timer(seconds, _say, (words,))
    timer.daemon = True
    timer.start()
    process = os.getpid()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if os.getpid() != process:
            try:
                _say(f"megaopt: {plugin} forked while it was imported; the process that it made ends here\n")
            finally:
                os._exit(70)
        timer.cancel()


def _say(words: str) -> None:
    sys.stderr.write(words)
    sys.stderr.flush()
