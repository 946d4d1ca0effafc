"""Lightning: checkpoints of optimizers whose states are shared out over ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from megaopt_core import MegatronOptimizer
from megaopt_trainers.whole_states import whole_state_dict

__all__ = ["WholeStates"]


class WholeStates(pl.Callback):  # type: ignore[misc,unused-ignore] # where it is not installed
    """Lets `ModelCheckpoint` and `trainer.save_checkpoint` save states that ranks share, under the strategy `ddp`.

    Lightning asks the optimizer for its state dict on all ranks, and writes that of rank 0. With this callback rank 0
    has the whole of it. Without it, saving raises where `sharding="layer_wise"` or `"distributed"` shares states out.

    Example:
        `lightning.Trainer(strategy="ddp", callbacks=[WholeStates()])`
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
        if states is not None:
            checkpoint["optimizer_states"] = [
                whole_state_dict(optimizer) if isinstance(optimizer, MegatronOptimizer) else state
                for optimizer, state in zip(trainer.optimizers, states, strict=True)
            ]
