"""What a `torch.optim.Optimizer` is to the outside, where megaopt's differs from torch's own base class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.optimizers._live_state import LiveState
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._tied_params import Twins

__all__ = ["TorchSurface"]


class TorchSurface(torch.optim.Optimizer):
    """Public groups, live state, and refusals of what cannot work once everything is built.

    Args:
        parts: what will be stepped.
        param_groups: the public groups, holding the model's parameters.
        names: model parameter to canonical name.
    """

    parts: list[OptimizerPart]

    def __init__(
        self,
        parts: Sequence[OptimizerPart],
        param_groups: Sequence[dict[str, Any]],
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        self._built = False
        super().__init__([{"params": []}], _common_defaults(parts))
        self.parts = list(parts)
        self.param_groups = list(param_groups)
        self.names = names
        self._live_state = LiveState(self.parts, names)
        self._built = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The public groups. Reading them adds gradients of twins to those of the parameters that the groups hold.

        Twins are in no group: who goes through the groups between backward and step, as `torch.amp.GradScaler` does to
        unscale and check gradients, would miss theirs.
        """
        twins: Twins | None = self.__dict__.get("twins")
        if twins is not None:
            twins.fold_grads()
        groups: list[dict[str, Any]] = self.__dict__["_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.__dict__["_groups"] = value

    @property
    def state(self) -> Any:
        """Live state keyed by model parameter: what the inner optimizers hold, under the parameters that users know."""
        if self.__dict__.get("_built"):
            return self._live_state
        return self.__dict__.setdefault("_torch_state", defaultdict(dict))

    @state.setter
    def state(self, value: Any) -> None:
        if self.__dict__.get("_built"):
            raise UnsupportedOperationError(
                "optimizer.state cannot be replaced; change its entries, or load a state dict"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: groups, sharding and state are decided when the optimizer is built.

        Args:
            param_group: what would be added.

        Raises:
            UnsupportedOperationError: always, once the optimizer is built.
        """
        if self.__dict__.get("_built"):
            raise UnsupportedOperationError(
                "add_param_group is not possible after the optimizer is built: routing, sharding and state are fixed "
                "then. Build a new optimizer from the extended model, and load the old one's state_dict with "
                "strict=False"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise UnsupportedOperationError(
            "an optimizer cannot be pickled or copied; save its state_dict() instead"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__getstate__()

    def refresh_state(self) -> None:
        """Show the state of parameters that were added or replaced."""
        self._live_state = LiveState(self.parts, self.names)

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """Return every model parameter that this optimizer steps on this rank."""
        return [param for group in self.param_groups for param in group["params"]]

    def get_main_params(self) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizers step."""
        return [tensor for part in self.parts for tensor in part.stepped]


def _common_defaults(parts: Sequence[OptimizerPart]) -> dict[str, Any]:
    """Return the first optimizer's defaults that all have: what torch's schedulers may count on in every group.

    `momentum` is among them where one optimizer has it and the others have it or betas: set on a group with betas, it
    means the first of them.
    """
    if not parts:
        return {}
    every = [part.inner.defaults for part in parts]
    first, *others = every
    common = {key: value for key, value in first.items() if all(key in other for other in others)}
    momenta = [defaults["momentum"] for defaults in every if "momentum" in defaults]
    if momenta and "betas" not in common:
        common.setdefault("momentum", momenta[0])
    return common
