"""Kernels of which each sample scales the channels: they stay matrices, of which the samples share one."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from megaopt_core.params import Doubt, Role
from megaopt_core.routing import infer_roles


class Styled(nn.Module):
    """Convolves each sample with a kernel that its style scales."""

    def __init__(self, *, normalize: bool = True) -> None:
        super().__init__()
        self.normalize = normalize
        self.kernel, self.style = nn.Parameter(torch.randn(1, 8, 6, 3, 3)), nn.Linear(5, 6)
        self.colors = nn.Conv2d(8, 3, 1)

    def scaled(self, style: torch.Tensor) -> torch.Tensor:
        """Return a kernel for each sample."""
        kernel = 0.1 * self.kernel * self.style(style).view(-1, 1, 6, 1, 1)
        if self.normalize:
            size = torch.rsqrt(kernel.pow(2).sum([2, 3, 4]) + 1e-8)
            kernel = kernel * size.view(-1, 8, 1, 1, 1)
        return kernel

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """Return colors."""
        b, c, h, w = x.shape
        kernel = self.scaled(style).view(b * 8, c, 3, 3)
        x = functional.conv2d(x.reshape(1, b * c, h, w), kernel, padding=1, groups=b)
        return self.colors(x.view(b, 8, h, w).relu())


class Enlarged(Styled):
    """The same by a transposed convolution."""

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """Return colors."""
        b, c, h, w = x.shape
        kernel = self.scaled(style).view(b * 8, c, 3, 3).view(b, 8, c, 3, 3)
        kernel = kernel.transpose(1, 2).reshape(b * c, 8, 3, 3)
        x = functional.conv_transpose2d(x.reshape(1, b * c, h, w), kernel, stride=2, groups=b)
        return self.colors(x.view(b, 8, *x.shape[2:]).relu())


@pytest.mark.parametrize("normalize", [True, False])
def test_a_kernel_that_each_sample_scales_is_a_matrix(normalize: bool) -> None:
    """A row for each channel that comes out."""
    model = Styled(normalize=normalize)
    assert model(torch.randn(2, 6, 5, 5), torch.randn(2, 5)).shape == (2, 3, 5, 5)
    decision = infer_roles(model)["kernel"]
    assert (decision.role, decision.doubt) == (Role.MATRIX, Doubt.NONE), decision
    assert decision.view is not None
    assert decision.view.matrix_shapes(model.kernel.shape) == ((1, 8, 54),)


def test_a_kernel_whose_channels_change_places_is_a_doubtful_matrix() -> None:
    """What goes in lies behind what comes out."""
    model = Enlarged()
    assert model(torch.randn(2, 6, 5, 5), torch.randn(2, 5)).shape[:2] == (2, 3)
    decision = infer_roles(model)["kernel"]
    assert decision.role is Role.MATRIX
    assert decision.uncertain
    assert decision.view is not None
    assert decision.view.matrix_shapes(model.kernel.shape) == ((1, 8, 54),)


class Gained(nn.Module):
    """Scales an image with a table of as many dimensions as a kernel has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.colors = nn.Parameter(torch.randn(1, 6, 4, 4)), nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return colors."""
        return self.colors(self.table * x)


def test_what_scales_an_image_is_no_kernel() -> None:
    """No product contracts it."""
    assert infer_roles(Gained())["table"].role is Role.ELEMENTWISE
