"""The Trainer of Hugging Face: checkpoints of optimizers whose states are shared out over ranks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from megaopt_core import MegatronOptimizer
from megaopt_trainers.whole_states import whole_state_dict

__all__ = ["WholeStates"]


class WholeStates(transformers.TrainerCallback):  # type: ignore[misc,unused-ignore] # where it is not installed
    """Lets the Trainer save states that ranks share, under DistributedDataParallel.

    The Trainer asks the optimizer for its state dict on rank 0 alone. This callback gathers the states there at the end
    of a step after which the Trainer will save. Without it, saving raises where `sharding="layer_wise"` or
    `"distributed"` shares states out.

    Example:
        `Trainer(model, arguments, callbacks=[WholeStates()], ...)`
    """

    def __init__(self) -> None:
        self._ready: dict[str, Any] | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        """Let the state dict be what was gathered, while the Trainer saves.

        Args:
            args: settings of the Trainer.
            state: where the run is.
            control: what comes next.
            optimizer: the Trainer's, wrapped by accelerate or not.
            **more: not used.
        """
        ours = _ours(optimizer)
        if ours is not None and self._hook is None:
            self._hook = ours.register_state_dict_post_hook(lambda _, own: self._ready or own)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        """Gather the states where the Trainer will save: all ranks come here.

        Args:
            args: settings of the Trainer.
            state: where the run is.
            control: what comes next.
            optimizer: the Trainer's, wrapped by accelerate or not.
            **more: not used.
        """
        self._gather(control, optimizer)

    on_epoch_end = on_step_end
    """Do so at the end of an epoch."""

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Let go of what was gathered.

        Args:
            args: settings of the Trainer.
            state: where the run is.
            control: what comes next.
            **more: not used.
        """
        self._ready = None

    def _gather(self, control: Any, optimizer: Any) -> None:
        ours = _ours(optimizer)
        if control.should_save and ours is not None:
            self._ready = whole_state_dict(ours)


def _ours(optimizer: torch.optim.Optimizer | None) -> MegatronOptimizer | None:
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, MegatronOptimizer) else None
