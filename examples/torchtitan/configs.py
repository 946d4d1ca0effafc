"""torchtitan's small Llama with Muon, as a module of configurations that torchtitan's own `train.py` reads.

torchrun --nproc-per-node 8 -m torchtitan.train --module configs --config llama3_muon
torchrun --nproc-per-node 8 -m torchtitan.train --module configs --config llama3_muon --optimizer.lr 1e-3
"""

from megaopt_trainers.torchtitan import MegaoptOptimizers
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def llama3_muon() -> Trainer.Config:
    """Return the configuration of torchtitan's debug model, with Muon in place of AdamW."""
    config = llama3_debugmodel()
    config.optimizer = MegaoptOptimizers.Config(
        optimizer="muon", lr=3e-3, weight_decay=0.1, settings={"muon_momentum": 0.95}
    )
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = True
    return config
