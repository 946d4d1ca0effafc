"""Lightning: checkpoints of optimizers whose states are shared out over ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from megaopt_core import MegatronOptimizer
from megaopt_trainers.whole_states import whole_state_dict

__all__ = ["WholeStates"]


class WholeStates(pl.Callback):  # type: ignore[misc,unused-ignore] # where it is not installed
    """Lets `ModelCheckpoint` and `trainer.save_checkpoint` save states that ranks share, under the strategy `ddp`.

    Lightning asks the optimizer for its state dict on all ranks, and writes that of rank 0. With this callback rank 0
    has the whole of it where `sharding="layer_wise"` or `"distributed"` shares states out. Lightning finds the callback
    by itself where `megaopt-trainers` is installed; no script names it.
    """

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put whole states in the place of those of one rank.

        Args:
            trainer: has the optimizers.
            pl_module: the model.
            checkpoint: what will be written; changed in place.
        """
        states = checkpoint.get("optimizer_states")
        if states is not None and isinstance(trainer.strategy, DDPStrategy):
            checkpoint["optimizer_states"] = [
                whole_state_dict(optimizer) if _shares(optimizer) else state
                for optimizer, state in zip(trainer.optimizers, states, strict=True)
            ]


def _shares(optimizer: Any) -> bool:
    """Return whether ranks have parts of an optimizer's states: the same on all of them."""
    routing = optimizer.routing if isinstance(optimizer, MegatronOptimizer) else None
    return routing is not None and routing.sharding != "replicated"
