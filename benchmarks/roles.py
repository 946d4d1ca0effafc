"""Roles of library models against the autograd graph of a run, and how long routing takes.

    python benchmarks/roles.py torchvision timm transformers [--limit 100]

Every model is built on the meta device from its default settings; nothing is downloaded. Models that cannot be run
there are timed, and their roles are not judged.
"""

import argparse
import inspect
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
from unittest import mock

import torch
from harness import write_result
from roles_oracle import OUTPUT_LIKE, graph_roles
from torch import nn
from torch.utils._pytree import tree_map_only

from megaopt_core.params import Doubt, Role, RoleDecision
from megaopt_core.routing import infer_roles

type Named = tuple[str, Callable[[], nn.Module]]


def torchvision_models() -> Iterator[Named]:
    """Yield every model of torchvision."""
    import torchvision

    for name in torchvision.models.list_models():
        if not name.startswith("quantized"):
            yield name, lambda name=name: torchvision.models.get_model(name, weights=None, **_plain(name))


def _plain(name: str) -> dict[str, Any]:
    """Return what keeps a model from fetching the weights of its backbone, or from filling weights with numbers."""
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}
    detects = any(part in name for part in ("rcnn", "retinanet", "fcos", "ssd", "deeplab", "fcn_", "lraspp"))
    return {"weights_backbone": None} if detects else {}


def timm_models() -> Iterator[Named]:
    """Yield one model of every file of timm, and of every class in it."""
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
    """Return a configuration with few layers: more of the same say nothing more."""
    for name in (
        "num_hidden_layers",
        "encoder_layers",
        "decoder_layers",
        "num_layers",
        "n_layer",
        "n_layers",
    ):
        if SMALL and isinstance(getattr(config, name, None), int):
            with contextlib.suppress(AttributeError, ValueError, NotImplementedError):
                setattr(config, name, min(getattr(config, name), 2))
    return config


SMALL = True
LIBRARIES = {"torchvision": torchvision_models, "timm": timm_models, "transformers": transformers_models}


_DETECTS = ("cls_logits", "bbox_pred", "bbox_reg", "bbox_ctrness", "cls_score", "mask_fcn_logits",
            "kps_score_lowres", "classification_head.module_list", "regression_head.module_list")  # fmt: skip


def roles_of_detector(model: nn.Module) -> dict[int, str]:
    """Return the roles in a detector of torchvision by the names of its predictions; nothing for any other model.

    Detectors sort boxes by their values, so that they cannot run without any.
    """
    if "detection" not in type(model).__module__:
        return {}
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            kernel = module.weight.dim() > 2 and module.weight.shape[1] == 1
            last = re.search(r"module_list\.\d+\.[01]\.", name + ".") is None or module.kernel_size == (1, 1)
            head = any(part in name for part in _DETECTS) and last
            found[id(module.weight)] = "table" if kernel else ("output" if head else "matrix")
    return found


def run(model: nn.Module) -> list[torch.Tensor | None]:
    """Return the outputs of a run with some inputs: predictions, None, the others.

    Grouped products of experts are there for bfloat16 alone: what fails in float32 is tried in it, too.
    """
    error: Exception | None = None
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    for dtype in (torch.float32, torch.bfloat16):
        for args, kwargs in _inputs(model):
            given = tree_map_only(torch.Tensor, lambda x, dtype=dtype: _as(x, dtype), (args, kwargs))
            try:
                with _without_values():
                    return _sorted(model, model(*given[0], **given[1]))
            except Exception as failed:  # noqa: BLE001 - inputs are tried
                error = error or failed
        if not hasattr(model, "config"):
            break
        model.to(torch.bfloat16)
    raise error or RuntimeError("no inputs")


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype).requires_grad_() if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Take conditions on tensors that have no values for false, such as whether nothing is masked."""
    with mock.patch.object(torch.Tensor, "__bool__", return_value=False):
        yield


def _inputs(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    config = getattr(model, "config", None)
    if config is None:
        size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
        for shape in (size, (3, 224, 224), (3, 256, 256), (3, 16, 224, 224)):
            yield (_image(shape),), {}
        yield (_image((3, 256, 256)), _image((3, 256, 256))), {}
        return
    names = list(inspect.signature(model.forward).parameters)
    ids = torch.ones(2, 12, dtype=torch.long)
    text = {"input_ids": ids}
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = ids
    if "bbox" in names:
        text["bbox"] = torch.ones(2, 12, 4, dtype=torch.long)
    side = getattr(config, "image_size", None) or getattr(
        getattr(config, "vision_config", None), "image_size", 224
    )
    side = side if isinstance(side, int) else side[0]
    channels = getattr(config, "num_channels", 3)
    vision = {"pixel_values": _image((channels if isinstance(channels, int) else 3, side, side))}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        yield (), text
        yield (), {**text, **vision}
    elif main == "pixel_values":
        yield (), vision
        yield (), {**vision, **({"input_ids": ids} if "input_ids" in names else {})}
        yield (), {"pixel_values": _image((3, 224, 224))}
        yield (), {"pixel_values": _image((16, 3, 224, 224))}
    else:
        mels = getattr(config, "num_mel_bins", 80)
        for shape in ((2, 16000), (2, mels, 3000), (2, 200, mels), (2, 1024, mels), (2, 1, 16000)):
            extra = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
            yield (), {main: torch.zeros(shape).requires_grad_(), **extra}


def _image(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(2, *shape).requires_grad_()


def _sorted(model: nn.Module, result: Any) -> list[torch.Tensor | None]:
    from torch.utils._pytree import tree_leaves

    headless = getattr(model, "num_classes", 1) == 0
    if hasattr(result, "keys") and hasattr(model, "config"):
        good = [k for k in result if not any(part in k for part in OUTPUT_LIKE)]
        good = good if "For" in type(model).__name__ or "LMHead" in type(model).__name__ else []
        parts = [result[k] for k in good], [result[k] for k in result if k not in good]
    else:
        parts = ([], result) if headless or hasattr(model, "config") else (result, [])
    first, second = ([t for t in tree_leaves(part) if isinstance(t, torch.Tensor)] for part in parts)
    return [*first, None, *second]


def judge(
    model: nn.Module, found: dict[str, RoleDecision], roles: dict[int, str]
) -> tuple[list[str], Counter[str]]:
    """Compare what is decided with what a run shows; return what is wrong, and counts."""
    problems, counts = [], Counter()
    for name, param in model.named_parameters():
        if sum(size > 1 for size in param.shape) < 2 or id(param) not in roles:
            counts["unjudged"] += param.dim() > 1
            continue
        said, shown = found[name], roles[id(param)]
        kind = {Role.MATRIX: "matrix", Role.OUTPUT: "output"}.get(said.role, "table")
        if kind == "output" and shown == "matrix" and "output" not in roles.values():
            counts["unjudged"] += 1  # a model of features: what its last layers are is a matter of taste
            continue
        right = kind == shown or (said.role is Role.EMBEDDING and shown != "matrix")
        doubtful = said.doubt is Doubt.ROLE
        counts[f"{'right' if right else 'wrong'}, {'doubtful' if doubtful else 'certain'}"] += 1
        if not right or doubtful:
            problems.append(f"{name} {tuple(param.shape)}: {said.role}{' ?' if doubtful else ''} "
                            f"(the graph: {shown}) {said.reason}")  # fmt: skip
    return problems, counts


def main() -> None:
    """Measure, print, and write `results/roles_LIBRARY.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", choices=LIBRARIES)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--only", default="")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for library in args.libraries:
        total, seconds, failed, wrong = Counter(), {}, [], []
        for i, (name, build) in enumerate(LIBRARIES[library]()):
            if i >= args.limit or args.only not in name or i % args.part[1] != args.part[0]:
                continue
            try:
                with torch.device("meta"):
                    model = build().eval()
            except Exception as error:  # noqa: BLE001 - some need what is not installed
                failed.append(f"{name}: cannot be built ({type(error).__name__})")
                continue
            start = time.process_time()
            said = infer_roles(model)
            seconds[name] = time.process_time() - start
            try:
                with torch.device("meta"):
                    roles = roles_of_detector(model) or graph_roles(model, run(model))
            except Exception as error:  # noqa: BLE001 - some cannot run without values
                failed.append(f"{name}: cannot be run ({type(error).__name__}: {str(error)[:80]})")
                continue
            problems, counts = judge(model, said, roles)
            total += counts
            total["models"] += 1
            for problem in problems:
                line = f"{name}.{problem}"
                wrong.append(line)
                print(line, flush=True)
        slowest = sorted(seconds.items(), key=lambda pair: -pair[1])[:5]
        result = {
            "part": args.part,
            "counts": dict(total),
            "timed": len(seconds),
            "slowest": slowest,
            "not judged": failed,
            "wrong or doubtful": wrong,
        }
        print(library, dict(total), slowest, len(failed), "failed", flush=True)
        if not args.no_write:
            print(write_result(f"roles_{library}", result))
        else:
            for line in failed:
                print("  ", line)


if __name__ == "__main__":
    main()
