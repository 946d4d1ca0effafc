"""Optimizer classes that stand under other names than they call themselves."""

import torch

Better = torch.optim.SGD


class SGD(torch.optim.Adam):
    """Somebody's own class of a name that torch has."""


class Generated(torch.optim.Adam):
    """What the function below calls its classes too."""


def make(sign: float) -> type[torch.optim.Optimizer]:
    """Return a class that goes along the gradient, or against it."""

    class Generated(torch.optim.Optimizer):
        def __init__(self, params, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self) -> None:
            """Take one step."""
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.add_(param.grad, alpha=sign * group["lr"])

    return Generated


Ascent, Descent = make(1.0), make(-1.0)
One, Other = type("Other", (torch.optim.SGD,), {}), type("One", (torch.optim.Adam,), {})

__all__ = ["SGD", "Ascent", "Better", "Descent", "Generated", "One", "Other"]
