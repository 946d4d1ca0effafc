"""What layers of a model take of each other, beside all else that its forwards say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from megaopt_core.routing import is_projection
from megaopt_roles.forward.dependencies import GUESSED, Call, call_behind, is_mark
from megaopt_roles.model.analyses import HOLDERS, holds_more
from megaopt_roles.model.ends import ModelEnds
from megaopt_roles.model.head_columns import find_head_columns
from megaopt_roles.model.unread import is_torchs

__all__ = ["ModelReading"]


class ModelReading(ModelEnds):
    """What the sources of a model say: of its parameters, of where values come from, and of what layers take.

    Args:
        modules: every module of the model, by canonical name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self._scaling: dict[int, bool] = {}

    def is_followed(self, name: str, module: nn.Module) -> bool:
        """True for a projection that some later layer takes the output of, or that torch's own module calls.

        Args:
            name: its canonical name.
            module: the projection.
        """
        if id(module) in self.surely_consumed and id(module) not in self._unread:
            return True
        holder: nn.Module | None = None
        while name and (holder is None or isinstance(holder, HOLDERS) or holder is module):
            name = name.rpartition(".")[0]
            holder = self._modules.get(name)
        return holder is None or holder is module or is_torchs(holder)

    @cached_property
    def consumed(self) -> frozenset[int]:
        """The projections, and weights used by hand, whose output a later layer takes, by identity."""
        return frozenset[int]().union(*self._consumers)

    @cached_property
    def surely_consumed(self) -> frozenset[int]:
        """Those of them of which it was seen; the others are parts of something unknown, from which a layer takes."""
        return self._consumers[0] | self._consumers[1]

    @cached_property
    def scaled(self) -> frozenset[int]:
        """Those of them whose output nothing but norms and gains take: these may stand behind a head, too."""
        return self._consumers[1] - self._consumers[0] - self._consumers[2]

    @cached_property
    def weighing(self) -> frozenset[int]:
        """The projections that make shares of a mixture, or scores by which a softmax weighs, by identity."""
        return self.used_as("sharing") | self.used_as("weighing")

    @cached_property
    def _consumers(self) -> tuple[frozenset[int], ...]:
        """What layers take, what norms and gains take, and what it is not known that either takes."""
        found, done = [set[int]() for _ in range(3)], [set[Any]() for _ in range(3)]
        seen = set[int]()
        for module in self._modules.values():
            if id(module) in seen or (is_torchs(module) and not module._modules):
                continue
            if is_projection(module) and not holds_more(module):
                continue
            seen.add(id(module))
            first: dict[Any, int] = {}
            trained = {id(call.module) for call in self.analysis(module).calls if not call.cut_off}
            for call in self.analysis(module).calls:
                by_hand = isinstance(call.module, nn.Parameter)
                start = call.order if by_hand else first.setdefault((id(call.module), call.site), call.order)
                # the input aside, what is fed back in a loop, what a layer takes of itself, and what is made a second
                # time to be given: an estimate without a gradient
                fed = [
                    dep
                    for dep in call.deps
                    if not is_mark(dep)
                    and dep.module is not call.module
                    and not call_behind(dep).slope
                    and not (call_behind(dep).cut_off and id(dep.module) in trained and not call.cut_off)
                    and (dep.order < start or _stands_before(dep, call) or not _comes_from(dep, call))
                ]
                which = 2 if GUESSED in call.deps else int(self._only_scales(call.module))
                found[which].update(self.origins(frozenset(fed), done[which])[0])
        return tuple(map(frozenset, found))

    def _only_scales(self, module: nn.Module | nn.Parameter) -> bool:
        """True for a norm, a gain or an activation with parameters: nothing in it has more than one dimension."""
        if not isinstance(module, nn.Module):
            return False
        structure = self._templates.structure(module)
        if structure not in self._scaling:
            self._scaling[structure] = all(param.dim() < 2 for param in module.parameters())
        return self._scaling[structure]

    @cached_property
    def head_columns(self) -> dict[int, int]:
        """Columns of a head in output projections, by identity."""
        return find_head_columns(self, self._modules)


def _stands_before(dep: Any, call: Call) -> bool:
    """True for a dependency that is made before a call in each round of a loop: the source has it further above."""
    made = call_behind(dep)
    for one, other in zip(made.site, call.site, strict=False):
        if one is not other:
            ends = [(node.end_lineno or 0, node.end_col_offset or 0) for node in (one, other)]
            return ends[0] < ends[1]
    return False


def _comes_from(dep: Any, call: Call) -> bool:
    """True for a dependency that comes from an earlier round of the same call: it is fed back."""
    stack, seen = [dep], set[Any]()
    while stack:
        at = stack.pop()
        if is_mark(at) or at in seen:
            continue
        seen.add(at)
        made = call_behind(at)
        if made.module is call.module and made.site == call.site:
            return True
        stack.extend(made.deps)
    return False
