"""Keys that match parameters: by name pattern, by attribute, by predicate."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from attrs import field, frozen

from megaopt_core.errors import OverrideError
from megaopt_core.params._roles import Role

__all__ = ["ParamKey", "ParamPredicate", "ParamWithNamePredicate"]


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
        return bool(self.fn(param, name))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _of_type(kind: type) -> Callable[[Any, Any, tuple[Any, ...]], None]:
    def check(_key: Any, attribute: Any, entries: tuple[Any, ...]) -> None:
        for entry in entries:
            if not isinstance(entry, kind):
                raise OverrideError(
                    f"ParamKey({attribute.name}=...) takes {kind.__name__} or a tuple of them, "
                    f"got {type(entry).__name__}: {entry!r}",
                    key=attribute.name,
                    value=entry,
                )

    return check


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
        role: what the parameter was found to be; matches during routing, where roles are known.

    Raises:
        OverrideError: a field holds something of another type.

    Example:
        >>> import torch
        >>> key = ParamKey(name=("*.bias", "*norm*"))
        >>> key.matches(torch.nn.Parameter(torch.empty(3)), "layers.0.norm.weight")
        True
    """

    name: str | tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_of_type(str))
    attr: str | tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_of_type(str))
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = field(
        default=(), converter=_as_tuple, validator=_of_type(ParamPredicate)
    )
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = field(
        default=(), converter=_as_tuple, validator=_of_type(ParamWithNamePredicate)
    )
    role: Role | tuple[Role, ...] = field(
        default=(), converter=_as_tuple, validator=_of_type(Role), kw_only=True
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
        for pattern in _as_tuple(self.name):
            if fnmatchcase(param_name, pattern):
                return f"name {pattern!r}"
        for attribute in _as_tuple(self.attr):
            if getattr(param, attribute, False):
                return f"attribute {attribute!r}"
        for predicate in _as_tuple(self.predicate):
            if predicate(param):
                return f"predicate {predicate.name!r}"
        for predicate in _as_tuple(self.with_name_predicate):
            if predicate(param, param_name):
                return f"predicate {predicate.name!r}"
        if role is not None and role in _as_tuple(self.role):
            return f"role {role.value!r}"
        return None

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in (("name", self.name), ("attr", self.attr)) if value]
        for name, entries in (
            ("predicate", self.predicate),
            ("with_name_predicate", self.with_name_predicate),
        ):
            if entries:
                parts.append(f"{name}={tuple(entry.name for entry in _as_tuple(entries))!r}")
        if self.role:
            parts.append(f"role={tuple(role.value for role in _as_tuple(self.role))!r}")
        return f"ParamKey({', '.join(parts)})"
