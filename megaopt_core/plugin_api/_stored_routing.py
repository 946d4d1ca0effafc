"""The routing that a checkpoint holds: what every parameter was, and which optimizer stepped it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, frozen

from megaopt_core.params._roles import Role
from megaopt_core.params._views import MatrixView

__all__ = ["StoredParam", "StoredRouting"]


@frozen
class StoredParam:
    """Where one parameter went.

    Args:
        optimizer: registered name of the optimizer that stepped it.
        role: what it was; None: that was not kept, and what is found here holds.
        view: how it was seen as matrices; None unless the role is `MATRIX`.
        shape: of the whole parameter, which `view` is of.
    """

    optimizer: str
    role: Role | None = None
    view: MatrixView | None = None
    shape: tuple[int, ...] = ()


@frozen
class StoredRouting:
    """Where every parameter of a run went.

    Args:
        name: what errors and reports call it, such as a checkpoint's folder.
        params: canonical name to where it went, of every trainable parameter of all ranks.
        readers: who had read the roles: distributions and versions; empty: nobody.
        plugins: optimizer to the distribution that brought it, as far as that is known.

    Example:
        >>> stored = StoredRouting("last week's run", {"weight": StoredParam("adam")})
        >>> stored.params["weight"].optimizer
        'adam'
    """

    name: str
    params: Mapping[str, StoredParam]
    readers: str = ""
    plugins: Mapping[str, str] = Factory(dict)
