"""What plugins do wrong, in words that can always be shown, and imports that take too long."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaopt_core.errors import MegaoptError, PluginError

__all__ = ["SLOW_SECONDS", "call_blaming", "loading", "words_of"]

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


def call_blaming[**P, T](
    what: Callable[[], str], action: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Return what a plugin's code returns; an error of it says who failed. Megaopt's own errors, and warnings, say it.

    Args:
        what: returns the first words of the message: the code, its plugin, and that it failed.
        action: the code.
        *arguments: its arguments.
        **named: its arguments by name.

    Raises:
        PluginError: the code raised something else; that is the cause.

    Example:
        >>> call_blaming(lambda: "transform halve of plugin 'mine' failed", lambda: 1 / 0)
        Traceback (most recent call last):
        megaopt_core.errors.PluginError: transform halve of plugin 'mine' failed: ZeroDivisionError: division by zero
    """
    try:
        return action(*arguments, **named)
    except (MegaoptError, Warning):
        raise
    except Exception as error:
        raise PluginError(f"{what()}: {words_of(error)}") from error


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
