"""Keys that match parameters: by name pattern, by attribute, by predicate."""

# ruff: noqa: RUF009 - the helper returns an attrs field

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from attrs import field, frozen

from megaopt_core.errors import OverrideError, naming_user_function
from megaopt_core.params._roles import Role

__all__ = ["ParamKey", "ParamPredicate", "ParamWithNamePredicate", "as_tuple"]


@frozen
class ParamPredicate:
    """A function of a parameter, made hashable by a name.

    Two predicates are equal when their names are, whatever their functions.

    Args:
        name: what the predicate is called; equality and hash use nothing else.
        fn: takes the parameter, returns whether it matches.

    Example:
        >>> import torch
        >>> vector = ParamPredicate(name="vector", fn=lambda param: param.dim() == 1)
        >>> vector(torch.empty(10))
        True
        >>> vector == ParamPredicate(name="vector", fn=lambda param: False)
        True
    """

    name: str
    fn: Callable[[torch.nn.Parameter], bool] = field(eq=False, hash=False)

    def __call__(self, param: torch.nn.Parameter) -> bool:
        """Return whether the parameter matches."""
        with naming_user_function(
            f"predicate {self.name!r}", f" on a parameter of shape {tuple(param.shape)}"
        ):
            return bool(self.fn(param))


@frozen
class ParamWithNamePredicate:
    """A function of a parameter and its qualified name, made hashable by a name.

    Args:
        name: what the predicate is called; equality and hash use nothing else.
        fn: takes the parameter and its qualified name, returns whether it matches.

    Example:
        >>> import torch
        >>> late = ParamWithNamePredicate(name="late", fn=lambda param, name: name.startswith("layers.11."))
        >>> late(torch.empty(1), "layers.11.bias")
        True
    """

    name: str
    fn: Callable[[torch.nn.Parameter, str], bool] = field(eq=False, hash=False)

    def __call__(self, param: torch.nn.Parameter, name: str) -> bool:
        """Return whether the parameter matches under this name."""
        with naming_user_function(f"predicate {self.name!r}", f" on parameter {name!r}"):
            return bool(self.fn(param, name))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return what a field of a key holds, which may be one value, as several.

    Args:
        value: of the field.
    """
    return value if isinstance(value, tuple) else (value,)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _entries(kind: type, *, converter: Callable[[Any], Any] = _hashable, kw_only: bool = False) -> Any:
    """Return a field for one value or several; it reads back as given, and one value equals a tuple of it."""

    def check(_key: Any, attribute: Any, value: Any) -> None:
        for entry in as_tuple(value):
            if not isinstance(entry, kind):
                raise OverrideError(
                    f"ParamKey({attribute.name}=...) takes {kind.__name__} or a tuple of them, "
                    f"got {type(entry).__name__}: {entry!r}",
                    key=attribute.name,
                    value=entry,
                )

    return field(default=(), converter=converter, eq=as_tuple, validator=check, kw_only=kw_only)


def _roles(value: Any) -> Any:
    """Return roles for their names."""
    if isinstance(value, list | tuple):
        return tuple(map(_roles, value))
    if not isinstance(value, str):
        return value
    try:
        return Role(value)
    except ValueError:
        raise OverrideError(
            f"ParamKey(role={value!r}): must be one of {', '.join(repr(role.value) for role in Role)}",
            key="role",
            value=value,
        ) from None


@frozen
class ParamKey:
    """Matches parameters; an override is attached to a key.

    Each field may be one value or a tuple of values. A parameter matches when **any** entry of **any** field
    matches: a logical OR over all of them.

    Args:
        name: Unix glob (`fnmatch`, case-sensitive, `*` crosses dots) against the qualified name.
        attr: name of an attribute that the parameter has with a truthy value.
        predicate: called with the parameter.
        with_name_predicate: called with the parameter and its qualified name.
        role: what the parameter was found to be, a :class:`Role` or its name, such as `"embedding"`; matches during
            routing, where roles are known.

    Raises:
        OverrideError: a field holds something of another type, or no field holds anything: such a key matches nothing.

    Example:
        >>> import torch
        >>> key = ParamKey(name=("*.bias", "*norm*"))
        >>> key.matches(torch.nn.Parameter(torch.empty(3)), "layers.0.norm.weight")
        True
    """

    name: str | tuple[str, ...] = _entries(str)
    attr: str | tuple[str, ...] = _entries(str)
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = _entries(ParamPredicate)
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = _entries(
        ParamWithNamePredicate
    )
    role: Role | str | tuple[Role | str, ...] = _entries(Role, converter=_roles, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not any(as_tuple(getattr(self, name)) for name in _SHOWN):
            raise OverrideError(
                "ParamKey() matches nothing: give a name, an attr, a predicate, a with_name_predicate or a role"
            )

    def matches(self, param: torch.nn.Parameter, param_name: str) -> bool:
        """Return whether the parameter matches this key.

        Args:
            param: the parameter.
            param_name: its qualified name.
        """
        return self.matched_by(param, param_name) is not None

    def matched_by(self, param: torch.nn.Parameter, param_name: str, role: Role | None = None) -> str | None:
        """Return the first entry that matches, in words (`name '*.bias'`), or None when none does.

        Args:
            param: the parameter.
            param_name: its qualified name.
            role: what it was found to be; None where that is not known.
        """
        for pattern in as_tuple(self.name):
            if fnmatchcase(param_name, pattern):
                return f"name {pattern!r}"
        for attribute in as_tuple(self.attr):
            with naming_user_function(f"attribute {attribute!r}", f" of parameter {param_name!r}"):
                has_it = bool(getattr(param, attribute, False))
            if has_it:
                return f"attribute {attribute!r}"
        for predicate in as_tuple(self.predicate):
            if predicate(param):
                return f"predicate {predicate.name!r}"
        for predicate in as_tuple(self.with_name_predicate):
            if predicate(param, param_name):
                return f"predicate {predicate.name!r}"
        if role is not None and role in as_tuple(self.role):
            return f"role {role.value!r}"
        return None

    def __str__(self) -> str:
        entries = {name: tuple(map(say, as_tuple(getattr(self, name)))) for name, say in _SHOWN.items()}
        return f"ParamKey({', '.join(f'{name}={some!r}' for name, some in entries.items() if some)})"


_SHOWN: Mapping[str, Callable[[Any], str]] = {
    "name": str,
    "attr": str,
    "predicate": attrgetter("name"),
    "with_name_predicate": attrgetter("name"),
    "role": attrgetter("value"),
}
"""The fields of a key to what is shown of an entry."""
