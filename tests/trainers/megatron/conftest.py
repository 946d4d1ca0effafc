"""Ranks are forked from a server that has imported Megatron-core, which takes many seconds."""

import sys
from pathlib import Path

import warm

sys.path.insert(0, str(Path(__file__).parent))

warm.OTHERS += [
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
]
warm.PACKAGES.append("trainers")
