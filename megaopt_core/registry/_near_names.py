"""Names that are close to what somebody wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "plain_name"]

_SHORT = 2
"""Names no longer than this begin too many others."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'a' or 'b'?"`, empty when nothing is close.

    Args:
        name: what was given.
        known: what there is.

    Example:
        >>> did_you_mean("cosin", ["cosine", "linear"])
        "; did you mean 'cosine'?"
        >>> did_you_mean("torch.optim.AdamW", ["adam", "adamw"])
        "; did you mean 'adamw'?"
    """
    plain: dict[str, str] = {}
    for one in known:
        plain.setdefault(plain_name(one), one)
    asked = plain_name(name)
    close = [asked] if asked in plain else get_close_matches(asked, plain, n=3, cutoff=0.7)
    # `adamw_torch_fused` and the like: a name that is there, and more.
    close = close or [one for one in plain if len(one) > _SHORT and asked.startswith(one)][-1:]
    return f"; did you mean {' or '.join(repr(plain[one]) for one in close)}?" if close else ""


def plain_name(name: str) -> str:
    """Return a name without what people write differently: case, lines between words, the module before a class.

    Args:
        name: what was given, or what there is.

    Example:
        >>> plain_name("Adam_W")
        'adamw'
    """
    return re.sub(r"[\W_]", "", name.lower().removeprefix("torch.optim."))
