"""Names that are the same parameter's on every rank: layers by their number in the model, experts by theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from megaopt_core import ProcessGroupCollection
from megaopt_core.parallel import rank_in, size_of
from megaopt_core.params import is_marked_expert, named_modules, named_params

__all__ = ["global_names"]

_OF_ONE_EXPERT = re.compile(r"(weight|bias)(\d+)")
"""A tensor of one expert, in a layer that multiplies those of several experts at once."""


def global_names(chunks: Sequence[torch.nn.Module], pgs: ProcessGroupCollection) -> Callable[[int, str], str]:
    """Return a function from chunk index and local name to the name that is unique in the whole model.

    Pipeline stages count their layers from zero, and expert-parallel ranks their experts.

    Args:
        chunks: the model chunks of this rank.
        pgs: the process groups.
    """
    found = [_names_in(chunk, rank_in(pgs.ep), size_of(pgs.ep)) for chunk in chunks]
    return lambda chunk, name: found[chunk].get(name, name)


def _names_in(chunk: torch.nn.Module, rank: int, ranks: int) -> dict[str, str]:
    """Return local name to global name of all parameters of a chunk."""
    modules = dict(named_modules(chunk))
    layers, experts = _numbers_of_layers(modules), _numbers_of_experts(modules, rank)
    names = _copies_of_embeddings(modules)
    copies = set(names)
    for entry in named_params(chunk):
        is_cut = ranks > 1 and is_marked_expert(entry.param)
        for name in {entry.name, *entry.aliases} - copies:
            *owners, attribute = name.split(".")
            paths = list(accumulate(owners, "{}.{}".format))
            parts = [
                experts.get(path) or layers.get(path, part) for path, part in zip(paths, owners, strict=True)
            ]
            is_numbered = any(path in experts for path in paths)
            grouped = getattr(modules[".".join(owners)], "num_gemms", None)
            one = _OF_ONE_EXPERT.fullmatch(attribute)
            if one and type(grouped) is int:
                attribute, is_numbered = f"{one[1]}{rank * grouped + int(one[2])}", True
            parts += [attribute, *([f"of_expert_rank_{rank}"] if is_cut and not is_numbered else [])]
            names[name] = ".".join(parts)
    return names


def _copies_of_embeddings(modules: dict[str, torch.nn.Module]) -> dict[str, str]:
    """Return the name of the last stage's copy of a tied embedding table to the name of the table.

    Both begin with the same values and get the same gradient, so that either is what a checkpoint holds.
    """
    return {
        f"{path}.output_layer.weight".lstrip("."): f"{path}.embedding.word_embeddings.weight".lstrip(".")
        for path, module in modules.items()
        if getattr(module, "share_embeddings_and_output_weights", False) is True
        and getattr(module, "post_process", False) is True
        and getattr(module, "pre_process", True) is False
    }


def _numbers_of_layers(modules: dict[str, torch.nn.Module]) -> dict[str, str]:
    found = {}
    for path, module in modules.items():
        parent, _, last = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if last.isdigit() and type(number) is int and parent.endswith("layers"):
            found[path] = str(number - 1)
    return found


def _numbers_of_experts(modules: dict[str, torch.nn.Module], rank: int) -> dict[str, str]:
    found = {}
    for path in modules:
        parent, _, last = path.rpartition(".")
        if last.isdigit() and parent.endswith("local_experts"):
            here = len(list(modules[parent].children()))
            found[path] = str(rank * here + int(last))
    return found
