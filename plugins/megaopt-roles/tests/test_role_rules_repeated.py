"""Layers that repeat are read once, also where an object of their own does what they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_roles.forward import templates
from megaopt_roles.forward.sources import quiet
from torch import nn

from megaopt_core.routing import infer_roles

WIDTH = 16


class Settings:
    """What an object may hold besides."""

    def __init__(self, parts: int) -> None:
        self.parts = parts


class Processor:
    """Computes what a layer is asked for, as those of attention layers do."""

    def __init__(self, parts: int) -> None:
        self.settings = Settings(parts)

    def __call__(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the product of all parts of what the layer projects."""
        first, *rest = layer.project(x).chunk(self.settings.parts, dim=-1)
        for part in rest:
            first = first * torch.sigmoid(part)
        return first


class Holding(Processor):
    """One that holds a tensor, too."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.scale = torch.ones(1)


class Slotted:
    """One without a dictionary."""

    __slots__ = ("parts",)

    def __init__(self, parts: int) -> None:
        self.parts = parts

    __call__ = Processor.__call__
    settings = property(lambda self: self)


class Layer(nn.Module):
    """Leaves all that it computes to its processor."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 12 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)
        self.processor = processor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream."""
        return x + self.back(self.processor(self, x))


@pytest.fixture
def analyses(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return the layers that are read, in a list that grows."""
    read: list[nn.Module] = []
    original = templates.analyze

    def counted(module: nn.Module, **options: Any) -> Any:
        if isinstance(module, Layer):
            read.append(module)
        return original(module, **options)

    monkeypatch.setattr(templates, "analyze", counted)
    return read


def test_layers_with_a_processor_each_are_read_once(analyses: list[nn.Module]) -> None:
    """Two objects of one class with the same attributes do the same."""
    found = infer_roles(nn.Sequential(*(Layer(Processor(3)) for _ in range(6)), nn.Linear(WIDTH, 5)))
    assert len(analyses) == 1
    views = {decision.view for name, decision in found.items() if name.endswith("project.weight")}
    assert [view.split_sizes for view in views if view is not None] == [(4 * WIDTH,) * 3]


@pytest.mark.parametrize("kind", [Processor, Holding, Slotted])
def test_a_processor_with_other_settings_is_read_for_itself(
    kind: Callable[[int], Any], analyses: list[nn.Module]
) -> None:
    """What its settings say is not taken for what those of another one say."""
    found = infer_roles(nn.Sequential(Layer(kind(3)), Layer(kind(4)), nn.Linear(WIDTH, 5)))
    assert len(analyses) == 2
    views = [found[f"{at}.project.weight"].view for at in "01"]
    assert [view and view.split_sizes for view in views] == [(4 * WIDTH,) * 3, (3 * WIDTH,) * 4]


@pytest.mark.parametrize("value", [torch.ones(2), nn.Linear(2, 2), Slotted(2), (1, 2), print, {1}, 1j])
def test_only_plain_objects_have_nothing_but_attributes(value: Any) -> None:
    """What holds anything beside its dictionary is compared by identity."""
    assert quiet.own_attributes(value) is None
