"""torchtitan's small Llama learns to count.

torchrun --nproc-per-node 2 -m torchtitan.train --module before --config count
"""

from dataclasses import dataclass

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

NUMBERS = 64


class Tokens(BaseTokenizer):
    """Numbers are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def get_vocab_size(self):
        return NUMBERS


class Counting(BaseDataLoader):
    """Sequences that count up, from another number each."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.rank, self.shape, self.step = dp_rank, (local_batch_size, seq_len), 0

    def __iter__(self):
        count, length = self.shape
        while True:
            chance = torch.Generator().manual_seed(1000 * self.step + self.rank)
            first = torch.randint(NUMBERS, (count, 1), generator=chance)
            tokens = (first + torch.arange(length + 1)) % NUMBERS
            positions = torch.arange(length).expand(count, length).contiguous()
            self.step += 1
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]


def count() -> Trainer.Config:
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    if not torch.cuda.is_available():  # the backward of flex attention wants a GPU
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4, decay_ratio=0.8),
        training=TrainingConfig(local_batch_size=4, seq_len=32, steps=20, disable_cuda_graphs=True),
        dataloader=Counting.Config(),
        tokenizer=Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=5),
        checkpoint=CheckpointManager.Config(enable=True, interval=10, last_save_model_only=False),
        activation_checkpoint=None,
    )
