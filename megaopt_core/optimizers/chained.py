"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt_core.errors import ConfigurationError, OwnershipError
from megaopt_core.optimizers.base import MegatronOptimizer

__all__ = ["ChainedOptimizer"]


class ChainedOptimizer(MegatronOptimizer):
    """Steps several optimizers as one: one found-inf flag, one norm, one clip, one set of groups.

    The groups are the children's own dictionaries, so that a scheduler on the chain is a scheduler on the children. What
    class a child is makes no difference.

    Args:
        chained_optimizers: at least one optimizer; every rank has the same list, in the same order.

    Raises:
        ConfigurationError: the list is empty.
        OwnershipError: two children step one parameter.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        children = tuple(chained_optimizers)
        if not children:
            raise ConfigurationError("ChainedOptimizer needs at least one optimizer, got an empty list")
        names: dict[torch.nn.Parameter, str] = {}
        for child in children:
            twice = [name for param, name in child.names.items() if param in names]
            if twice:
                raise OwnershipError(f"two chained optimizers step {', '.join(twice)}", names=twice)
            names.update(child.names)
        self.chained_optimizers = list(children)
        self._setup(
            [part for child in children for part in child.parts],
            config=children[0].config,
            param_groups=[group for child in children for group in child.param_groups],
            names=names,
            process_groups=children[0].process_groups,
            grad_scaler=children[0].grad_scaler,
            routing=children[0].routing,
        )

    @property
    def children(self) -> tuple[MegatronOptimizer, ...]:
        """The chained optimizers."""
        return tuple(self.chained_optimizers)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step every child with the gradients that :meth:`prepare_grads` collected.

        Returns:
            True when every child has stepped.
        """
        return all([child.step_with_ready_grads() for child in self.chained_optimizers])
