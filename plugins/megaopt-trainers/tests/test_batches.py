"""A batch for roles is taken from a loader without a trace in the run."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from megaopt_trainers.batches import first_batch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Noisy(Dataset):
    """Items that draw from every generator, as augmentations do."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: NPY002, S311


class Stream(IterableDataset):
    """Counts what is taken from it."""

    taken = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for item in range(4):
            self.taken += 1
            yield torch.tensor(item)


def run(*, take: bool) -> torch.Tensor:
    """Return all that an epoch gives."""
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
    if take:
        assert first_batch(loader)[:, 0].tolist() == [0, 1]
    return torch.cat(list(loader))


def test_a_run_that_gave_a_batch_is_the_run_without():
    """The same items in the same order, with the same draws of every generator."""
    assert torch.equal(run(take=True), run(take=False))


def test_a_generator_of_the_loader_is_left_alone():
    """The sampler draws the order that it would have drawn."""
    orders = []
    for take in (True, False):
        loader = DataLoader(Noisy(), 2, shuffle=True, generator=torch.Generator().manual_seed(4))
        if take:
            first_batch(loader)
        orders.append([batch[:, 0].tolist() for batch in loader])
    assert orders[0] == orders[1]


def test_nothing_is_taken_from_an_iterable():
    """There is no batch, and the stream has not begun."""
    stream = Stream()
    assert first_batch(DataLoader(stream, batch_size=2)) is None
    assert stream.taken == 0


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Noisy(), batch_sampler=[[3, 4], [5]]),
        DataLoader(Noisy(), batch_size=None),
        DataLoader(Noisy(), batch_size=9, drop_last=True),
    ],
)
def test_other_ways_to_batch(loader):
    """The items are the first ones; there is a batch however the loader makes its own."""
    batch = first_batch(loader)
    assert torch.as_tensor(batch).reshape(-1, 4)[0, 0] == 0
