"""The model and the batches of the scripts beside it: a small transformer that sorts numbers."""

import os

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=64, width=32, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def choose_device():
    """Return "cuda" with this rank's GPU chosen, or "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "cuda"


def make_model(device):
    """Return the model with the same weights on all ranks."""
    torch.manual_seed(0)
    return Model().to(device)


def loss_of(model, step, device):
    """Return the loss of this rank's share of a batch of 16 lines, which is the same on any number of ranks."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    lines = torch.randint(64, (16, 17), generator=torch.Generator().manual_seed(step)).sort(dim=1).values
    mine = lines.chunk(ranks)[rank].to(device)
    return nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())


def finish(optimizer, loss):
    """Print the mean loss of all ranks and which optimizer stepped what, and end together."""
    torch.distributed.all_reduce(loss := loss.detach().clone())
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss.item() / torch.distributed.get_world_size():.3f}")
        print(str(optimizer.report()).partition("\n\n")[0])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
