"""SOAP as the documentation writes it, in float64, written to be read and not to be fast."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Reference:
    """One matrix, its factors and its bases; eigenvectors are columns, momentum is kept in the bases."""

    def __init__(
        self,
        value: torch.Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        shampoo_beta: float,
        eps: float,
        weight_decay: float,
        kl: bool,
        sides: tuple[bool, bool] = (True, True),
    ) -> None:
        self.value = value.detach().double().clone()
        self.lr, self.betas, self.shampoo_beta = lr, betas, shampoo_beta
        self.eps, self.weight_decay, self.kl, self.sides = eps, weight_decay, kl, sides
        self.step_number = self.updates = 0
        sizes = self.value.shape
        self.factors = [torch.zeros(size, size).double() for size in sizes]
        self.bases = [torch.eye(size).double() for size in sizes]
        self.m, self.v = torch.zeros_like(self.value), torch.zeros_like(self.value)

    def rotate(self, matrix: torch.Tensor) -> torch.Tensor:
        return self.bases[0].T @ matrix @ self.bases[1]

    def rotate_back(self, matrix: torch.Tensor) -> torch.Tensor:
        return self.bases[0] @ matrix @ self.bases[1].T

    def eigenvalues(self, side: int) -> torch.Tensor:
        return (self.bases[side].T @ self.factors[side] @ self.bases[side]).diagonal()

    def _accumulate(self, grad: torch.Tensor, *, plain: bool) -> None:
        weight = (1 - self.shampoo_beta) / (1 - self.shampoo_beta**self.step_number)
        left, right = grad @ grad.T, grad.T @ grad
        if self.kl and not plain and all(self.sides):
            inverses = [
                basis @ torch.diag(1 / self.eigenvalues(side).clamp_min(self.eps)) @ basis.T / len(basis)
                for side, basis in enumerate(self.bases)
            ]
            left, right = grad @ inverses[1] @ grad.T, grad.T @ inverses[0] @ grad
        for factor, new in zip(self.factors, (left, right), strict=True):
            factor.mul_(1 - weight).add_(new, alpha=weight)

    def _refresh(self) -> None:
        m = self.rotate_back(self.m)
        for side, active in enumerate(self.sides):
            if not active:
                continue
            if self.step_number == 1:
                self.bases[side] = torch.linalg.eigh(self.factors[side]).eigenvectors.flip(1)
                continue
            order = self.eigenvalues(side).argsort(descending=True)
            self.v = self.v.index_select(side, order)
            self.bases[side] = torch.linalg.qr(self.factors[side] @ self.bases[side][:, order]).Q
        self.m = self.rotate(m)

    def step(
        self,
        grad: torch.Tensor,
        *,
        frequency: int = 1,
        initialize: bool = False,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        grad = grad.detach().double()
        self.step_number += 1
        only_bases = initialize and self.step_number == 1
        self._accumulate(grad, plain=only_bases)
        if (self.step_number - 1) % frequency == 0:
            self._refresh()
        if only_bases:
            return
        self.updates += 1
        rotated, (beta1, beta2) = self.rotate(grad), self.betas
        self.m = beta1 * self.m + (1 - beta1) * rotated
        self.v = beta2 * self.v + (1 - beta2) * rotated.square()
        m, v = self.m / (1 - beta1**self.updates), self.v / (1 - beta2**self.updates)
        update = self.rotate_back(m / (v.sqrt() + self.eps))
        if transform is not None:
            update = transform(update)
        self.value = self.value * (1 - self.lr * self.weight_decay) - self.lr * update

    def begin_at(self, step: int, generator: torch.Generator) -> None:
        """Take a state in which every factor has full rank, as after some steps."""
        self.step_number = self.updates = step
        for side, size in enumerate(self.value.shape):
            samples = torch.randn(size, 4 * size, generator=generator).double()
            self.factors[side] = samples @ samples.T / size
            self.bases[side] = torch.linalg.eigh(self.factors[side]).eigenvectors.flip(1)
        self.m = torch.randn(self.value.shape, generator=generator).double()
        self.v = 0.5 + torch.rand(self.value.shape, generator=generator).double()


def give_state(state: dict[str, Any], reference: Reference) -> None:
    """Write a reference's state into that of a parameter that is one matrix."""
    state["step"].fill_(reference.step_number)
    state["exp_avg_is_rotated"].fill_(1.0)
    state["exp_avg"].copy_(reference.m)
    state["exp_avg_sq"].copy_(reference.v)
    for side, name in enumerate(("left", "right")):
        state[f"{name}_factor"].copy_(reference.factors[side])
        state[f"{name}_basis"].copy_(reference.bases[side].T)
        if f"{name}_eigenvalues" in state:
            state[f"{name}_eigenvalues"].copy_(reference.eigenvalues(side))


@pytest.fixture(scope="session")
def soap64() -> SimpleNamespace:
    """The reference, and what brings its state into an optimizer."""
    return SimpleNamespace(Reference=Reference, give_state=give_state)
