"""What plugins do wrong, in words that can always be shown, and imports that take too long."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SLOW_IMPORT_SECONDS", "naming_slow_imports", "only_in_this_process", "traceback_of", "words_of"]

logger = logging.getLogger(__name__)

SLOW_IMPORT_SECONDS = 5.0
"""After so many seconds the log names the plugin that is still being imported."""


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
def naming_slow_imports(plugin: str) -> Iterator[None]:
    """Write a log line that names a plugin if the block takes longer than `SLOW_IMPORT_SECONDS`, while it runs.

    Args:
        plugin: who is imported, in words.
    """
    seconds = SLOW_IMPORT_SECONDS
    timer = threading.Timer(
        seconds, logger.warning, ("%s has been importing for more than %g seconds", plugin, seconds)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def only_in_this_process(plugin: str) -> Iterator[None]:
    """End a process that a plugin forks off while it is imported: it would run the user's program a second time.

    Args:
        plugin: who is imported, in words.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            words = f"megaopt: {plugin} forked while it was imported; the process that it made ends here\n"
            try:
                sys.stderr.write(words)
                sys.stderr.flush()
            finally:
                os._exit(70)
