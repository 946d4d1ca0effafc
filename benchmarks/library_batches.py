"""Batches for library models, on the meta device: what a training loop would hand to the forward of each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["batches"]

type Batch = Any


def batches(model: nn.Module) -> Iterator[Batch]:
    """Yield batches that the model may take, the likeliest first: tuples of arguments, or mappings by keyword.

    Args:
        model: a model of `library_models`.
    """
    with torch.device("meta"):
        if hasattr(model, "config") and hasattr(model, "main_input_name"):
            yield from _transformers(model)
        elif "torchvision.models.detection" in type(model).__module__:
            yield ([_image((320, 320), 1)[0], _image((320, 320), 1)[0]],)
        elif "diffusers" in type(model).__module__:
            yield from _diffusers(model)
        else:
            yield from _images(model)
            yield from _guesses(model)


def _image(shape: tuple[int, ...], batch: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.zeros(batch, *(shape if len(shape) > 2 else (channels, *shape)))


def _images(model: nn.Module) -> Iterator[Batch]:
    size = getattr(model, "default_cfg", {}).get("input_size") or (3, 224, 224)
    convolved = any(isinstance(part, nn.Conv2d | nn.Conv3d) for part in model.modules())
    if not convolved:
        return
    for shape in (size, (3, 224, 224), (3, 256, 256), (3, 16, 224, 224), (3, 64, 64), (3, 32, 32)):
        yield (_image(tuple(shape)),)
    yield _image((3, 256, 256)), _image((3, 256, 256))


def _transformers(model: nn.Module) -> Iterator[Batch]:
    config: Any = model.config
    names = list(inspect.signature(model.forward).parameters)
    ids = torch.ones(2, 12, dtype=torch.long)
    text: dict[str, Any] = {"input_ids": ids}
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = ids
    if "bbox" in names:
        text["bbox"] = torch.ones(2, 12, 4, dtype=torch.long)
    vision = getattr(config, "vision_config", None)
    side = getattr(config, "image_size", None) or getattr(vision, "image_size", 224)
    side = side if isinstance(side, int) else 224 if side is None else side[0]
    channels = getattr(config, "num_channels", 3)
    pixels = {"pixel_values": _image((channels if isinstance(channels, int) else 3, side, side))}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        yield from (text, {**text, **pixels})
    elif main == "pixel_values":
        extra = {"input_ids": ids} if "input_ids" in names else {}
        yield from (pixels, {**pixels, **extra})
        yield {"pixel_values": _image((3, 224, 224)), **extra}
        yield {"pixel_values": _image((16, 3, 224, 224)), **extra}
    else:
        mels = getattr(config, "num_mel_bins", 80)
        for shape in ((2, 16000), (2, mels, 3000), (2, 200, mels), (2, 1024, mels), (2, 1, 16000)):
            extra = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
            yield {main: torch.zeros(shape), **extra}


def _diffusers(model: nn.Module) -> Iterator[Batch]:
    """Yield batches by the names that forwards of diffusers give their arguments."""
    config: Any = model.config
    channels = config.get("in_channels", config.get("latent_channels", 4)) or 4
    across = config.get(
        "cross_attention_dim", config.get("joint_attention_dim", config.get("caption_channels", 64))
    )
    across = (
        across
        if isinstance(across, int)
        else (across or (64,))[0]
        if isinstance(across, list | tuple)
        else 64
    )
    side = config.get("sample_size", 32)
    side = side if isinstance(side, int) and 8 <= side <= 64 else 32
    parameters = inspect.signature(model.forward).parameters
    for shape in (
        (2, channels, side, side),
        (2, channels, 8, side, side),
        (2, 16, channels),
        (2, channels, 16),
    ):
        given: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name in ("sample", "hidden_states", "x", "latents"):
                given[name] = torch.zeros(shape)
            elif name == "timestep" and parameter.default in (None, inspect.Parameter.empty):
                given[name] = torch.zeros(2, dtype=torch.long)
            elif name == "encoder_hidden_states" and parameter.default in (None, inspect.Parameter.empty):
                given[name] = torch.zeros(2, 7, across)
            elif name == "pooled_projections":
                given[name] = torch.zeros(2, config.get("pooled_projection_dim", 64) or 64)
            elif name in ("class_labels", "controlnet_cond") and parameter.default is inspect.Parameter.empty:
                given[name] = (
                    torch.zeros(2, 3, 8 * side, 8 * side)
                    if "cond" in name
                    else torch.zeros(2, dtype=torch.long)
                )
            elif name in ("img_ids", "txt_ids"):
                given[name] = torch.zeros(16 if name == "img_ids" else 7, 3)
            elif name == "guidance" and config.get("guidance_embeds"):
                given[name] = torch.zeros(2)
        yield given


def _guesses(model: nn.Module) -> Iterator[Batch]:
    """Yield batches from the sizes of the first layers, one for every argument without a default."""
    import itertools

    required = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind.name.startswith("POSITIONAL")
    ]
    ids = torch.zeros(2, 16, dtype=torch.long)
    features = list(
        dict.fromkeys(part.in_features for part in model.modules() if isinstance(part, nn.Linear))
    )[:3]
    features += [part.input_size for part in model.modules() if isinstance(part, nn.RNNBase)][:1]
    planes = [part for part in model.modules() if isinstance(part, nn.modules.conv._ConvNd)][:1]
    bare = list(
        dict.fromkeys(size for param in model.parameters() if param.dim() == 2 for size in param.shape)
    )[:3]
    one: list[torch.Tensor] = []
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in model.modules()):
        one.append(ids)
    for part in planes:
        sides = (32, 64, 224) if len(part.kernel_size) == 2 else (16, 64)
        one += [torch.zeros(2, part.in_channels, *[side] * len(part.kernel_size)) for side in sides]
        one.append(torch.zeros(2, 20, part.in_channels))
    for size in (*features, *bare):
        one += [torch.zeros(2, 16, size), torch.zeros(2, size)]
    one += [
        ids,
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2),
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(2, 16),
    ]
    yield from itertools.islice(itertools.product(one, repeat=max(1, len(required))), 200)
