"""torchtitan's own Trainer, with its own debug models, and data that every run sees alike."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import titan_on_cpu  # noqa: F401 - before torchtitan
import torch
from megaopt_trainers.torchtitan import MegaoptOptimizers
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from megaopt_core import ProcessGroupCollection, build_optimizer

__all__ = [
    "LENGTH",
    "SEQUENCES",
    "Run",
    "adam",
    "far",
    "model",
    "muon",
    "muon_alone",
    "titans",
    "trainer",
    "weights",
]

SEQUENCES, LENGTH, VOCABULARY = 4, 16, 2048


def titans(lr: float = 8e-4) -> OptimizersContainer.Config:
    """Return torchtitan's own AdamW."""
    return default_adamw(lr)


def adam(lr: float = 8e-4, **fields: Any) -> MegaoptOptimizers.Config:
    """Return our Adam with the settings of torchtitan's AdamW, which decays every parameter."""
    settings = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    return MegaoptOptimizers.Config(optimizer="adam", lr=lr, settings=settings, overrides={}, **fields)


def muon(lr: float = 8e-4) -> MegaoptOptimizers.Config:
    """Return our Muon with settings under which it matters little how runs are cut."""
    # Two steps of Newton-Schulz enlarge what ranks round differently by 12, five by 485.
    settings = {"muon_fp32_matmul_prec": "highest", "muon_tp_mode": "duplicated", "muon_num_ns_steps": 2}
    return MegaoptOptimizers.Config(optimizer="muon", lr=lr, settings=settings)


class Tokens(BaseTokenizer):
    """Turns nothing into tokens: the data are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        return []

    def decode(self, *_: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Numbers(BaseDataLoader):
    """Four sequences a step, dealt out over data-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.size, self.rank, self.at = dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        mine = SEQUENCES // self.size
        while True:
            chance = torch.Generator().manual_seed(1000 + self.at)
            tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=chance)
            tokens = tokens[self.rank * mine : (self.rank + 1) * mine]
            self.at += 1
            positions = torch.arange(LENGTH).expand(mine, LENGTH).contiguous()
            yield (
                {"input": tokens[:, :-1].contiguous(), "positions": positions},
                tokens[:, 1:].contiguous(),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def model(name: str, layers: int) -> Any:
    """Return one of torchtitan's debug models, with torch's own attention: flex attention wants a GPU."""
    if name == "llama3":
        spec = llama3.model_registry("debugmodel")
    else:
        spec = deepseek_v3.model_registry("debugmodel", attn_backend="flex", moe_comm_backend="standard")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def trainer(
    optimizer: OptimizersContainer.Config,
    name: str = "llama3",
    *,
    steps: int = 3,
    layers: int = 2,
    chunked_loss: bool = False,
    folder: str | None = None,
    load_step: int = -1,
    decay: Literal["linear", "sqrt", "cosine"] = "linear",
    **parallelism: Any,
) -> Trainer:
    """Return a trainer whose model has the same weights in every run.

    Args:
        optimizer: what the configuration chooses.
        name: of the model, `llama3` or `deepseek_v3`.
        steps: how many are taken.
        layers: how many the model has; of DeepSeek's the first is dense, the others have experts.
        chunked_loss: the loss calls the output layer, and the model leaves it out.
        folder: of checkpoints, one every second step; None: none.
        load_step: the checkpoint that is loaded; -1: the last.
        decay: how learning rates fall after the warm-up.
        **parallelism: fields of `ParallelismConfig`.
    """
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    degrees = [parallelism.get(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline")]
    data_parallel = torch.distributed.get_world_size() // (degrees[0] * degrees[1])
    config = Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if chunked_loss else loss,
        hf_assets_path="",
        model_spec=model(name, layers),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2, decay_ratio=0.5, decay_type=decay, min_lr_factor=0.1, total_steps=8
        ),
        training=TrainingConfig(
            local_batch_size=SEQUENCES // data_parallel,
            global_batch_size=SEQUENCES,
            seq_len=LENGTH,
            steps=steps,
            dtype="float32",
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Numbers.Config(),
        tokenizer=Tokens.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(**parallelism),
        checkpoint=CheckpointManager.Config(
            enable=folder is not None,
            folder=folder or "checkpoints",
            interval=2,
            last_save_model_only=False,
            load_step=load_step,
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=False),
        debug=DebugConfig(seed=0),
        dump_folder=folder or "outputs",
    )
    made = Trainer(config)
    _start(made)
    return made


def _named(made: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for part in made.model_parts:
        yield from part.named_parameters()


def _start_of(name: str, shape: torch.Size) -> torch.Tensor:
    """Return first weights, which depend on a parameter's name and nothing else."""
    chance = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=chance) * 0.05 + (len(shape) == 1)


@torch.no_grad()
def _start(made: Trainer) -> None:
    """Give every model the same weights, however it is cut."""
    for name, param in _named(made):
        value = _start_of(name, param.shape)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            everywhere = distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)
            param.to_local().copy_(everywhere.redistribute(mesh, param.placements).to_local())
        else:
            param.copy_(value)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    """Return whole weights by name."""
    return {name: _whole(param) for name, param in _named(made)}


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight, relative to its norm."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / other[name].norm()).item() for name in one)


@dataclass
class Run:
    """The results of a run: losses and learning rates of each step, and weights; before each step, the gradients."""

    losses: list[float]
    rates: list[list[float]]
    weights: dict[str, torch.Tensor]
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, made: Trainer, *, keeps_grads: bool = False) -> "Run":
        """Train, and write down what torchtitan logs.

        Args:
            made: the trainer.
            keeps_grads: write whole gradients down too, as torchtitan has clipped them.
        """
        losses, rates, grads = [], [], []

        def log(step: int, loss: float, *_: Any, extra_metrics: dict[str, float], **__: Any) -> None:
            losses.append(loss)
            rates.append([value for name, value in extra_metrics.items() if name.startswith("lr/")])

        def keep(*_: Any) -> None:
            found = ((name, param.grad) for name, param in _named(made))
            grads.append({name: _whole(grad) for name, grad in found if grad is not None})

        made.metrics_processor.log = log
        if keeps_grads:
            made.optimizers.register_step_pre_hook(keep)
        made.train()
        return cls(losses, rates, weights(made), grads)


def muon_alone(name: str, run: Run, layers: int = 2) -> dict[str, torch.Tensor]:
    """Return weights that :func:`muon` makes of a bare model, in this process alone, from the gradients of a run.

    Args:
        name: of the model.
        run: with its gradients and learning rates.
        layers: how many the model has.
    """
    bare = model(name, layers).model.build()
    params = dict(bare.named_parameters())
    with torch.no_grad():
        for each, param in params.items():
            param.copy_(_start_of(each, param.shape))
    chosen = muon()
    optimizer = build_optimizer(
        bare,
        chosen.optimizer,
        pg_collection=ProcessGroupCollection(),
        clip_grad=0.0,
        weight_decay=chosen.weight_decay,
        **chosen.settings,
    )
    for rates, grads in zip(run.rates, run.grads, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rates[0]
        for each, grad in grads.items():
            params[each].grad = grad
        optimizer.step()
    return {each: param.detach() for each, param in params.items()}
