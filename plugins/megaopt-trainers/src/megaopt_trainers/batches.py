"""A batch of a training run for roles, taken so that the run does not notice."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["first_batch"]


def first_batch(loader: DataLoader[Any]) -> Any:
    """Return the first items of a loader's dataset as one batch, for `build_optimizer(example=...)`.

    Nothing is taken from the loader: the first `batch_size` items of its dataset are collated here, whatever the order
    of training is. All random generators are as before, those of numpy included.

    Args:
        loader: a loader of a map-style dataset, which gives the same items each time it is asked.

    Returns:
        What the loader's `collate_fn` makes of the items; None where the dataset is iterable, or empty: an item that is
        taken from it would be missing in training.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from megaopt_trainers.batches import first_batch
        >>> loader = DataLoader(TensorDataset(torch.arange(6.0).reshape(3, 2)), batch_size=2, shuffle=True)
        >>> first_batch(loader)
        [tensor([[0., 1.],
                [2., 3.]])]
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or len(dataset) == 0:
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            if loader.batch_sampler is None:  # each item of the dataset is a batch
                return loader.collate_fn(dataset[0])
            return loader.collate_fn([dataset[index] for index in range(min(size, len(dataset)))])
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
