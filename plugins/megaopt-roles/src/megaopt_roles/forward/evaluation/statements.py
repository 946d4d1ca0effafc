"""Evaluating the statements of a forward."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from attrs import evolve

from megaopt_roles.forward.evaluation.calls import CallEvaluator
from megaopt_roles.forward.objects.alternatives import abstract, merge_values
from megaopt_roles.forward.objects.containers import MOST_ITEMS, items_of
from megaopt_roles.forward.objects.frames import Closure, Frame
from megaopt_roles.forward.sources.gradients import stops_gradients
from megaopt_roles.forward.sources.trees import function_tree, imported
from megaopt_roles.forward.values import Flow, deps_of, held_by
from megaopt_roles.forward.weights.contractions import is_fixed

__all__ = ["Evaluator"]

_STOPS = ("return", "raise")


class Evaluator(CallEvaluator):
    """Evaluates functions: every branch that may be taken, loops over modules element by element."""

    def run(self, function: Callable[..., Any], names: dict[str, Any]) -> Any:
        """Return what the body of a plain function returns; of several returns, all together.

        What a generator yields is a list.
        """
        tree = function_tree(function)
        return self.trace.unknown(names) if tree is None else self._body(tree.body, Frame(function, names))

    def run_closure(self, closure: Closure, names: dict[str, Any]) -> Any:
        """Return what a lambda or a nested function returns."""
        frame = Frame(closure.frame.function, names, closure.frame)
        if isinstance(closure.node, ast.Lambda):
            return self.evaluate(closure.node.body, frame)
        return self._body(closure.node.body, frame)

    def _body(self, body: Sequence[ast.stmt], frame: Frame) -> Any:
        returned: list[Any] = []
        self._block(body, frame, returned)
        return frame.yielded or self._either_return(returned)

    def _either_return(self, returned: list[Any]) -> Any:
        values = [value for value in returned if value is not None]
        if not values:
            return None
        if len(values) == 1:
            return values[0]
        kinds = {
            (isinstance(value, dict), len(value) if isinstance(value, list | tuple) else None)
            for value in values
        }
        if len(kinds) == 1 and not any(isinstance(value, Flow) and value.held for value in values):
            return self._either(values)
        return Flow(deps_of(values), held=tuple(part for value in values for part in held_by(value)))

    def _block(self, body: Sequence[ast.stmt], frame: Frame, returned: list[Any]) -> str | None:
        for statement in body:
            self.trace.spend()
            method = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            signal: str | None = method(statement, frame, returned) if method else None
            if signal is not None:
                return signal
        return None

    def _do_return(self, node: ast.Return, frame: Frame, returned: list[Any]) -> str:
        returned.append(self.evaluate(node.value, frame))
        return "return"

    def _do_raise(self, node: ast.Raise, frame: Frame, returned: list[Any]) -> str:
        return "raise"

    def _do_break(self, node: ast.Break, frame: Frame, returned: list[Any]) -> str:
        return "break"

    def _do_continue(self, node: ast.Continue, frame: Frame, returned: list[Any]) -> str:
        return "continue"

    def _do_expr(self, node: ast.Expr, frame: Frame, returned: list[Any]) -> None:
        self.evaluate(node.value, frame)

    def _do_assign(self, node: ast.Assign, frame: Frame, returned: list[Any]) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)

    def _do_annassign(self, node: ast.AnnAssign, frame: Frame, returned: list[Any]) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)

    def _do_augassign(self, node: ast.AugAssign, frame: Frame, returned: list[Any]) -> None:
        before = self.evaluate(node.target, frame)
        after = self.binary(type(node.op), before, self.evaluate(node.value, frame))
        if isinstance(node.target, ast.Attribute) and type(after) in (int, float):
            after = Flow()  # a counter: another value each time
        self.assign(node.target, after, frame)

    def _do_import(self, node: ast.Import, frame: Frame, returned: list[Any]) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            frame.names[alias.asname or name] = _known(imported(frame.function, name))

    def _do_importfrom(self, node: ast.ImportFrom, frame: Frame, returned: list[Any]) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            value = imported(frame.function, module, alias.name)
            frame.names[alias.asname or alias.name] = _known(value)

    def _do_functiondef(self, node: ast.FunctionDef, frame: Frame, returned: list[Any]) -> None:
        frame.names[node.name] = Closure(node, frame)

    def _do_if(self, node: ast.If, frame: Frame, returned: list[Any]) -> str | None:
        known = self.truth(self.evaluate(node.test, frame))
        if known is not None:
            taken, other = (node.body, node.orelse) if known else (node.orelse, node.body)
            signal = self._block(taken, frame, returned)
            # A check that fails has met a size that stands in for another one: go on as if it had passed.
            return self._block(other, frame, returned) if signal == "raise" else signal
        before = dict(frame.names)
        first = self._block(node.body, frame, returned)
        after_first = dict(frame.names)
        frame.names.clear()
        frame.names.update(before)
        second = self._block(node.orelse, frame, returned)
        if first is not None and second is not None:
            return first if first == second else "return"
        if second is not None:
            frame.names.clear()
            frame.names.update(after_first)
        elif first is None:
            self._join(frame, after_first)
        return None

    def _join(self, frame: Frame, other: dict[str, Any]) -> None:
        for name, value in other.items():
            frame.names[name] = merge_values(value, frame.names[name]) if name in frame.names else value

    def _do_for(self, node: ast.For, frame: Frame, returned: list[Any]) -> str | None:
        items = items_of(self.trace, self.evaluate(node.iter, frame))
        self.trace.go_through(items)
        _begin_states(node, frame)
        enough = self.trace.budget // 2
        for position, item in enumerate(items):
            if type(item) is int and 2 < position < len(items) - 2 and self.trace.budget < enough:
                continue  # a long body counted many times: its two ends say enough
            self.assign(node.target, item, frame)
            signal = self._block(node.body, frame, returned)
            if signal in _STOPS:
                return signal
            if signal == "break":
                return None
        return self._block(node.orelse, frame, returned)

    def _do_while(self, node: ast.While, frame: Frame, returned: list[Any]) -> str | None:
        _begin_states(node, frame)
        for done in range(MOST_ITEMS):
            known = self.truth(self.evaluate(node.test, frame))
            if known is False or (known is None and done > 1):  # a condition that is not known holds twice
                break
            signal = self._block(node.body, frame, returned)
            if signal in _STOPS:
                return signal
            if signal == "break":
                break
        return None

    def _do_with(self, node: ast.With, frame: Frame, returned: list[Any]) -> str | None:
        for item in node.items:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Flow(), frame)
        cut = any(
            stops_gradients(item.context_expr, lambda part: self.evaluate(part, frame)) for item in node.items
        )
        self.trace.cut_off += cut
        try:
            return self._block(node.body, frame, returned)
        finally:
            self.trace.cut_off -= cut

    def _do_match(self, node: ast.Match, frame: Frame, returned: list[Any]) -> str | None:
        """Evaluate every case, one after the other, as if each were the one."""
        self.evaluate(node.subject, frame)
        before, signals = dict(frame.names), list[str | None]()
        for case in node.cases:
            inner = Frame(frame.function, dict(before), frame.outer, frame.yielded)
            if case.guard is not None:
                self.evaluate(case.guard, inner)
            signals.append(self._block(case.body, inner, returned))
            if signals[-1] is None:
                self._join(frame, inner.names)
        return "return" if signals and None not in signals else None

    def _do_try(self, node: ast.Try, frame: Frame, returned: list[Any]) -> str | None:
        signal = self._block([*node.body, *node.orelse], frame, returned)
        if signal == "raise":
            signal = None
            for handler in node.handlers:
                signal = self._block(handler.body, frame, returned)
        return self._block(node.finalbody, frame, returned) or signal


def _known(value: Any) -> Any:
    """Return what was imported in the form that the evaluator computes with; of None nothing is known."""
    return Flow() if value is None else abstract(value)


def _begin_states(loop: ast.For | ast.While, frame: Frame) -> None:
    """Take what is fixed for a first state where the loop reads it, and puts something else in its place."""
    for name in _carried(loop) & frame.names.keys():
        frame.names[name] = _first_state(frame.names[name])


def _first_state(value: Any) -> Any:
    if type(value) in (tuple, list):  # another name may hold the same list
        return type(value)(map(_first_state, value)) if any(map(is_fixed, value)) else value
    return evolve(value, zero=True) if is_fixed(value) else value


@lru_cache(maxsize=256)
def _carried(loop: ast.For | ast.While) -> frozenset[str]:
    """Return the names that the body of a loop reads and assigns."""
    names = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    return frozenset(node.id for node in names if isinstance(node.ctx, ast.Store) and node.id in read)
