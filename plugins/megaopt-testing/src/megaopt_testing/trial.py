"""Building the optimizer under test, and the two ways in which checks give it gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from attrs import Factory, frozen
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import ConformanceError, DoubtfulRolesWarning
from megaopt_core.optimizers import MegatronOptimizer, StepResult
from megaopt_testing.models import CONTEXT, VOCABULARY, TinyGPT

__all__ = ["DEFAULT_SETTINGS", "MICRO_BATCHES", "Trial", "some"]

DEFAULT_SETTINGS: Mapping[str, Any] = {"lr": 0.01, "weight_decay": 0.01, "clip_grad": 0.0}
"""Settings of every check, unless the caller gives others. Nothing is clipped: clipping is the core's work."""

MICRO_BATCHES = 4
"""Into how many parts a gradient can be cut without changing a bit of its sum."""


def some(names: Iterable[str], limit: int = 4) -> str:
    """Return names for a message, cut short when there are many.

    Args:
        names: the names.
        limit: how many are shown.
    """
    listed = list(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")


@frozen
class Trial:
    """An optimizer under test with its settings.

    Args:
        optimizer: registered name.
        settings: any field of the configuration; they win over :data:`DEFAULT_SETTINGS`.
    """

    optimizer: str
    settings: Mapping[str, Any] = Factory(dict)

    def fail(self, message: str) -> NoReturn:
        """Raise `ConformanceError` with a message that begins with the optimizer's name.

        Args:
            message: what does not hold, and where to look.
        """
        raise ConformanceError(message, optimizer=self.optimizer)

    def model(self, seed: int = 0, *, dtype: torch.dtype = torch.float32, tied: bool = False) -> TinyGPT:
        """Return a small GPT whose weights depend on the seed alone.

        Args:
            seed: for the weights.
            dtype: of all parameters.
            tied: the head is the embedding.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TinyGPT(tied=tied).to(dtype)

    def build(self, model: nn.Module, **needed: Any) -> MegatronOptimizer:
        """Return the optimizer of a model, as users build it.

        Args:
            model: the model.
            **needed: settings that the check depends on; they win over all others.
        """
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DoubtfulRolesWarning
            )  # roles are the reader's: the optimizer is tried
            return build_optimizer(model, self.optimizer, **{**DEFAULT_SETTINGS, **self.settings, **needed})

    def backward(
        self, model: nn.Module, step: int, *, micro_batches: int = 1, poison: str | None = None
    ) -> None:
        """Give every parameter that trains a gradient that depends on name order, shape and `step` alone.

        The loss is linear in the parameters and its coefficients are small whole numbers divided by 64: sums are exact
        in fp32 and in bf16, so the gradients have the same bits however the batch is cut.

        Args:
            model: the model.
            step: gradients differ from step to step.
            micro_batches: number of backward passes that the gradient is accumulated from, 1 or `MICRO_BATCHES`.
            poison: name of a parameter whose gradient gets one infinite element.
        """
        generator = torch.Generator().manual_seed(1000 + step)
        params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        cut = [
            torch.randint(-63, 64, (MICRO_BATCHES, *param.shape), generator=generator).to(param.dtype) / 64.0
            for _, param in params
        ]
        parts = cut if micro_batches == MICRO_BATCHES else [part.sum(dim=0, keepdim=True) for part in cut]
        for (name, _), part in zip(params, parts, strict=True):
            if name == poison:
                part.view(-1)[0] = float("inf")
        for index in range(micro_batches):
            terms = [(param * part[index]).sum() for (_, param), part in zip(params, parts, strict=True)]
            (torch.stack(terms).sum() / MICRO_BATCHES).backward()

    def step_given(self, model: nn.Module, optimizer: MegatronOptimizer, step: int, **how: Any) -> StepResult:
        """Clear gradients, give new ones with :meth:`backward`, and step.

        Args:
            model: the model.
            optimizer: its optimizer.
            step: gradients differ from step to step.
            **how: arguments of :meth:`backward`.
        """
        optimizer.zero_grad()
        self.backward(model, step, **how)
        return optimizer.step()

    def train_step(self, model: nn.Module, optimizer: MegatronOptimizer, step: int) -> float:
        """Train on one batch of random tokens that depends on `step` alone, and return the loss.

        Args:
            model: what :meth:`model` returned.
            optimizer: its optimizer.
            step: batches differ from step to step.
        """
        generator = torch.Generator().manual_seed(2000 + step)
        tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator)
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        return loss.item()

    def own_names(self, optimizer: MegatronOptimizer) -> list[str]:
        """Return the parameters that the optimizer under test steps itself, not its fallback.

        Args:
            optimizer: what :meth:`build` returned.
        """
        own = self.own_params(optimizer)
        if not own:
            self.fail(
                "it takes no parameter of a small GPT: `accepts` refuses embeddings, matrices, norms and biases alike"
            )
        return list(own)

    def own_params(self, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
        """Return the parameters by name that the optimizer under test steps itself; there may be none.

        Args:
            optimizer: what :meth:`build` returned.
        """
        routes = {} if optimizer.routing is None else optimizer.routing.params
        params = {name: param for param, name in optimizer.names.items()}
        return {
            name: params[name]
            for name, entry in routes.items()
            if entry.spec.optimizer == self.optimizer and name in params
        }
