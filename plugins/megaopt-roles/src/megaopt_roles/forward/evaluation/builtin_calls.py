"""Python's own functions, on values that may not be known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, get_args

import torch

from megaopt_roles.forward.dependencies import is_mark
from megaopt_roles.forward.evaluation.expressions import ExpressionEvaluator
from megaopt_roles.forward.objects.attributes import operator_of
from megaopt_roles.forward.objects.containers import entries, items_of
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.values import Flow, Weight, is_abstract

__all__ = ["BuiltinEvaluator"]


class BuiltinEvaluator(ExpressionEvaluator):
    """Evaluates `enumerate`, `zip`, `getattr`... by methods that are called `_builtin_` and their name."""

    def _builtin_dict(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else {}
        if isinstance(given, list | tuple) and all(map(_is_pair, given)):
            given = dict(map(tuple, given))
        return {**(entries(given) or {}), **kwargs}

    def _builtin_enumerate(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        items = items_of(self.trace, args[0]) if args else []
        start = args[1] if len(args) > 1 else kwargs.get("start", 0)
        numbered = not self.is_uncounted(args[0]) and isinstance(start, int)
        loop = object()
        made = [(start + i if numbered else Flow(place=loop), item) for i, item in enumerate(items)]
        return made if numbered else self.as_uncounted(made)

    def _builtin_zip(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        columns = [items_of(self.trace, arg) for arg in args]
        sure = [len(column) for arg, column in zip(args, columns, strict=True) if not self.is_uncounted(arg)]
        made = [
            tuple(column[min(i, len(column) - 1)] if column else Flow() for column in columns)
            for i in range(min(sure) if sure else 2)
        ]
        return made if sure else self.as_uncounted(made)

    def _builtin_reversed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        items = self._copied(args[0]) if args else []
        items.reverse()
        return items

    def _builtin_map(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) == 2 and isinstance(args[1], Flow):
            return self.call(args[0], [args[1]], {})
        return [self.call(args[0], items, {}) for items in self._builtin_zip(args[1:], {})]

    def _builtin_range(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args and all(isinstance(arg, int) for arg in args):
            return range(*args)
        loop = object()
        return self.as_uncounted([Flow(place=loop), Flow(place=loop)])

    def _builtin_getattr(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) < 2 or not isinstance(args[1], str):
            return Flow()
        if len(args) > 2 and not is_abstract(args[0]) and not quiet.has(args[0], args[1:2]):
            return args[2]
        return self.read(args[0], args[1])

    def _builtin_setattr(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) > 2 and isinstance(args[1], str):
            self.assigned[id(args[0]), args[1]] = args[2]

    def _builtin_next(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args and type(args[0]) is list and args[0]:
            return args[0].pop(0)
        return (items_of(self.trace, args[0]) or [Flow()])[0] if args else Flow()

    def _builtin_iter(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not args or is_abstract(args[0]):
            return args[0] if args else Flow()
        return self._copied(args[0])

    def _builtin_tuple(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._builtin_list(args, kwargs)

    def _builtin_list(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Flow):
            return args[0]
        return self._copied(args[0]) if args else []

    def _copied(self, value: Any) -> list[Any]:
        """Return a list of what a loop over a value sees."""
        made = [*items_of(self.trace, value)]
        return self.as_uncounted(made) if self.is_uncounted(value) else made

    def _builtin_sum(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        items = quiet.items(args[0]) if args and not kwargs else None
        numbers = [] if items is None else [*items, *args[1:]]
        counted = items is not None and all(type(number) in (bool, int, float) for number in numbers)
        if items is not None and len(args) == 2 and all(type(each) is list for each in numbers):
            return [*chain(args[1], *items)]  # lists, one behind the other
        return sum(numbers) if counted else self.trace.unknown(*args)

    def _builtin_sorted(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        items = items_of(self.trace, args[0]) if args else []
        return sorted(items) if not kwargs and quiet.is_plain(items) else items

    def _builtin_hasattr(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        known = len(args) == 2 and isinstance(args[1], str) and not is_abstract(args[0])
        return quiet.has(args[0], args[1:]) if known else Flow()

    def _builtin_isinstance(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kinds = tuple(args[1]) if len(args) == 2 and isinstance(args[1], list) else args[-1]
        either = (
            type(args[0]) is list and not quiet.is_instance(args[0], kinds) and quiet.is_instance((), kinds)
        )
        if _is_made(args[0]):
            known = _is_tensor(kinds)
        elif is_abstract(args[0]) or either:  # or a tuple
            known = None
        else:
            known = quiet.is_instance(args[0], kinds)
        return Flow() if known is None else known

    def _builtin_len(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Weight) and args[0].shape:
            return args[0].shape[0]
        own = operator_of(args[0], "__len__") if args else None
        if own is not None:
            return self.call(own, [], {})
        held = quiet.items(args[0]) if args else None
        return Flow() if held is None or self.is_uncounted(args[0]) else len(held)

    def _builtin_type(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return Flow() if len(args) != 1 or is_abstract(args[0]) else type(args[0])


def _is_made(value: Any) -> bool:
    """True for a weight, and for what layers made whose shape is known: a tensor. What is given may be anything."""
    if isinstance(value, Flow):
        return value.tensor is not None and not all(map(is_mark, value.deps))
    return isinstance(value, Weight)


def _is_tensor(kinds: Any) -> bool | None:
    """Return whether a tensor is an instance of these classes; None where one of a subclass may be."""
    known = quiet.is_instance(torch.empty((), device="meta"), kinds)
    several = [
        part
        for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
        for part in get_args(kind) or (kind,)
    ]
    may_be = any(isinstance(kind, type) and issubclass(kind, torch.Tensor) for kind in several)
    return None if known is False and may_be else known


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str | int)
