"""Models of libraries, and the project's own, that roles are compared on; built on the meta device, nothing is fetched.

Every entry is a name and a function that builds the model from its default settings, with few layers where the
configuration says how many there are: more of the same say nothing more.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import lzma
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

__all__ = ["LIBRARIES", "Named"]

type Named = tuple[str, Callable[[], nn.Module]]

_ROOT = Path(__file__).parents[1]
_COUNTS = (
    "num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer", "n_layers", "depth",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip


def torchvision_models() -> Iterator[Named]:
    """Yield every model of torchvision."""
    import torchvision

    for name in torchvision.models.list_models():
        if name.startswith("regnet"):  # they count blocks with values
            if "mf" in name or "1_6gf" in name:
                yield (
                    name,
                    lambda name=name: _from_cpu(lambda: torchvision.models.get_model(name, weights=None)),
                )
        elif not name.startswith("quantized"):
            yield name, lambda name=name: torchvision.models.get_model(name, weights=None, **_plain(name))


def _from_cpu(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cpu"):
        model = build()
    return model.to("meta")


def _plain(name: str) -> dict[str, Any]:
    """Return what keeps a model from fetching the weights of its backbone, or from filling weights with numbers."""
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}
    detects = any(part in name for part in ("rcnn", "retinanet", "fcos", "ssd", "deeplab", "fcn_", "lraspp"))
    return {"weights_backbone": None} if detects else {}


def timm_models() -> Iterator[Named]:
    """Yield two models of every file of timm."""
    import timm

    for module in timm.list_modules():
        names = list(timm.list_models(module=module))
        for name in dict.fromkeys((names[0], names[-1])) if names else ():
            yield name, lambda name=name: timm.create_model(name)


def transformers_models() -> Iterator[Named]:
    """Yield one model for every configuration of transformers, the kinds of heads in turn."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        auto.MODEL_FOR_OBJECT_DETECTION_MAPPING, auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
        auto.MODEL_MAPPING,
    ]  # fmt: skip
    transformers.logging.set_verbosity_error()
    kinds: dict[Any, list[Any]] = {}
    for table in tables:
        for config in table:
            kinds.setdefault(config, []).append(table)
    for i, (config, having) in enumerate(sorted(kinds.items(), key=lambda item: item[0].__name__)):
        try:
            kind = having[i % len(having)][config]
        except ValueError:  # of a kind that this version names and does not have
            continue
        kind = kind[0] if isinstance(kind, tuple) else kind
        yield kind.__name__, lambda kind=kind, config=config: kind(_small(config()))


def _small(config: Any) -> Any:
    """Return a configuration with few layers."""
    for name in _COUNTS:
        if isinstance(getattr(config, name, None), int) and name != "depth":
            with contextlib.suppress(AttributeError, ValueError, NotImplementedError):
                setattr(config, name, min(getattr(config, name), 2))
    return config


def diffusers_models() -> Iterator[Named]:
    """Yield every model of diffusers that its default settings build."""
    import diffusers

    diffusers.logging.set_verbosity_error()
    for name in sorted(dir(diffusers)):
        with contextlib.suppress(Exception):  # some names need what is not installed
            kind = getattr(diffusers, name)
            if (
                inspect.isclass(kind)
                and issubclass(kind, diffusers.ModelMixin)
                and kind is not diffusers.ModelMixin
            ):
                yield name, lambda kind=kind: kind(**_few(kind))


def _few(kind: type) -> dict[str, int]:
    """Return arguments that make a model of few layers."""
    takes = inspect.signature(kind.__init__).parameters
    return {
        name: 2
        for name in ("num_layers", "num_single_layers", "n_layers", "depth", "num_refiner_layers")
        if name in takes and isinstance(takes[name].default, int) and takes[name].default > 2
    }


def peft_models() -> Iterator[Named]:
    """Yield small models of transformers under every kind of adapter that fits them."""
    import peft

    made = _load(_ROOT / "plugins/megaopt-roles/tests/library_models.py").REAL
    targets = {
        "llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"],
        "bert_classifier": ["query", "value"], "vit": ["q_proj", "v_proj"], "t5": ["q", "v", "wo"],
    }  # fmt: skip
    for method in sorted(peft.PEFT_TYPE_TO_CONFIG_MAPPING, key=str):
        config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[method]
        for base, names in targets.items():
            for label, more in _settings(
                method.value if hasattr(method, "value") else str(method), base, names
            ):
                yield (
                    f"{base}-{label}",
                    lambda config=config, base=base, more=more: _from_cpu(
                        lambda: peft.get_peft_model(made[base](), config(**more))
                    ),
                )


def _settings(method: str, base: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    task = {"bert_classifier": "SEQ_CLS", "vit": None, "t5": "SEQ_2_SEQ_LM"}.get(base, "CAUSAL_LM")
    plain = {"task_type": task} if task else {}
    label = method.lower()
    sizes = {
        "WAVEFT": {"n_frequency": 16},
        "PSOFT": {"r": 8},
        "VBLORA": {"vector_length": 16, "num_vectors": 8},
    }
    plain |= sizes.get(method, {})
    if method in (
        "PROMPT_TUNING",
        "P_TUNING",
        "PREFIX_TUNING",
        "MULTITASK_PROMPT_TUNING",
        "CPT",
        "ADAPTION_PROMPT",
    ):
        if base != "vit":
            yield label, {**plain, "num_virtual_tokens": 4} if method != "ADAPTION_PROMPT" else plain
    elif method == "LN_TUNING":
        yield label, plain
    elif method == "IA3":
        yield (
            label,
            {**plain, "target_modules": names, "feedforward_modules": [n for n in names if n == "down_proj"]},
        )
    elif method == "ADALORA":
        yield label, {**plain, "target_modules": names, "init_r": 4, "target_r": 2, "total_step": 10}
    else:
        yield label, {**plain, "target_modules": names}
    if method == "LORA":
        yield "dora", {**plain, "target_modules": names, "use_dora": True}
        ends = ["embed_tokens", "lm_head", "wte", "word_embeddings", "projection", "shared"]
        yield "lora-ends", {**plain, "target_modules": [*names, *ends]}


def own_models() -> Iterator[Named]:
    """Yield the models of this project's tests, demo and examples."""
    tests = _ROOT / "plugins/megaopt-roles/tests"
    for path in sorted((tests / "zoo").glob("zoo_*.py")):
        for name, (factory, _) in _load(path).EXPECTED.items():
            yield f"{path.stem}-{name}", factory
    for name, build in _load(tests / "library_models.py").REAL.items():
        yield f"real-{name}", build
    yield from _examples()


def _examples() -> Iterator[Named]:
    from megaopt_tools.model import GPT

    yield "demo", GPT
    yield "example-nanogpt", _load(_ROOT / "examples/nanogpt/model.py").GPT
    for name in ("deepspeed_zero", "megatron_style"):
        yield f"example-{name}", _load(_ROOT / f"examples/{name}/network.py").make_model
    yield "example-titan_style", _classes(_ROOT / "examples/titan_style/train.py")["Model"]
    yield (
        "example-torch_muon",
        lambda: nn.Sequential(
            nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 64)
        ),
    )


def _classes(path: Path) -> dict[str, Any]:
    """Return the classes of a script without running it."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(compile(tree, str(path), "exec"), scope)  # noqa: S102 - our own file
    return scope


def tested_models() -> Iterator[Named]:
    """Yield small models that tests of a reader of sources were made of, from their source texts."""
    data = json.loads(lzma.decompress((Path(__file__).parent / "role_data/tests.json.xz").read_bytes()))
    scope = {"torch": torch, "nn": nn, "F": F, "FusedLoss": FusedLoss, "OwnLinear": OwnLinear}
    for name, source in data["sources"].items():
        text, kind = (source, "Model") if isinstance(source, str) else (source["source"], source["class"])
        yield name, lambda text=text, kind=kind: _made(textwrap.dedent(text), kind, dict(scope))


def _made(text: str, kind: str, scope: dict[str, Any]) -> nn.Module:
    exec(text, scope)  # noqa: S102 - stored texts of our own
    model: nn.Module = scope[kind]()
    return model


class FusedLoss(torch.autograd.Function):
    """A loss that multiplies with a weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.T, target)


class OwnLinear(nn.Module):
    """A linear layer of its own class."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel.t()


def _load(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"_of_roles_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LIBRARIES = {
    "torchvision": torchvision_models,
    "timm": timm_models,
    "transformers": transformers_models,
    "diffusers": diffusers_models,
    "peft": peft_models,
    "own": own_models,
    "tests": tested_models,
}
"""Models by where they come from."""
