"""The calls that Megatron's training loop and checkpoints make on an optimizer, beside those that ours has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.params import named_params
from megaopt_trainers._megatron_checkpoint import FORMAT, load_sharded, sharded_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MegatronCalls", "with_megatron_calls"]

_TORCH_DIST = "save with --ckpt-format torch_dist, which any number of ranks loads"


class MegatronCalls(MegatronOptimizer):
    """Methods that Megatron's loop calls on its own optimizers; mixed into the class of one that is built."""

    _model: tuple[Sequence[torch.nn.Module], Callable[[int, str], str]]

    @property
    def is_stub_optimizer(self) -> bool:
        """False: a rank without parameters takes part in every collective."""
        return False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, where there is one."""
        if len(self.parts) != 1:
            raise AttributeError(
                f"this optimizer has {len(self.parts)} inner optimizers, and none that is its `optimizer`: use "
                "chained_optimizers, or param_groups, which holds the groups of all",
                name="optimizer",
                obj=self,
            )
        return self.parts[0].inner

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The optimizers of a chain; this one alone where it is none."""
        chained: list[MegatronOptimizer] = self.__dict__.get("chained_optimizers", [self])
        return chained

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The separate norms of the last step, by the name of their group."""
        return {name: norm for name, norm in self.grad_norms.items() if name is not None}

    def get_grad_stats_parallel_group(self) -> ProcessGroup:
        """Return the group over which norms and counts add up.

        Raises:
            UnsupportedOperationError: parts have different ones, as dense and expert parameters do.
        """
        groups = {id(part.sharded.stats_group): part.sharded.stats_group for part in self.parts}
        if len(groups) > 1:
            raise UnsupportedOperationError(
                f"{len(groups)} groups add up norms of this optimizer's parts; get_grad_norm() and count_zeros() use "
                "each, and every one of chained_optimizers has its own"
            )
        from megatron.core import parallel_state

        (group,) = groups.values()
        return parallel_state.get_model_parallel_group() if group is None else group

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> NoReturn:
        """Raise: gradients are added up where they lie.

        Args:
            grad_norm_group: a separate norm.

        Raises:
            UnsupportedOperationError: always.
        """
        del grad_norm_group
        raise UnsupportedOperationError(
            "get_grads_for_grad_norm: get_grad_norm() returns the norm of all ranks, grad_norms_by_group the separate "
            "ones, and param.main_grad has each gradient"
        )

    def prepare_model_params_for_param_sync(self) -> None:
        """Nothing to do: parameters lie in the buffers that Megatron gathers."""

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Take the model's values over into main parameters.

        Args:
            state_dict: parameters by name, or a checkpoint of Megatron's with them under `model`, or under `model0`,
                `model1` ... for several chunks.

        Raises:
            StateDictError: it lacks a parameter, or has another shape of one.
        """
        chunks, fqn = self._model
        several = len(chunks) > 1
        keys = [f"model{index}" if several else "model" for index in range(len(chunks))]
        if state_dict is None or not all(isinstance(state_dict.get(key), Mapping) for key in keys):
            super().reload_model_params(state_dict)
            return
        values: dict[str, torch.Tensor] = {}
        for index, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
            stored = {name.removeprefix("module."): value for name, value in state_dict[key].items()}
            for entry in named_params(chunk):
                present = [name for name in (entry.name, *entry.aliases) if name in stored]
                values.update({fqn(index, entry.name): stored[name] for name in present[:1]})
        super().reload_model_params(values)

    # State dicts and files.

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the state in torch's schema.

        Args:
            is_loading: state exists from the build on, so that a load needs nothing else.
        """
        del is_loading
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned, or what Megatron has read into :meth:`sharded_state_dict`.

        Args:
            state_dict: the state.
            strict: every parameter must be in the state dict and the other way round.

        Raises:
            StateDictError: names or shapes do not fit.
        """
        if set(state_dict) == {FORMAT}:
            load_sharded(self, state_dict[FORMAT])
        else:
            super().load_state_dict(state_dict, strict=strict)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = None,
        is_loading: bool = False,
        metadata: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the state as sharded tensors of Megatron's `dist_checkpointing`: a collective.

        Args:
            model_sharded_state_dict: not read: state is saved under names of its own.
            is_loading: not read: state exists from the build on.
            metadata: not read.
            **kwargs: not read.
        """
        del model_sharded_state_dict, is_loading, metadata, kwargs
        return sharded_state(self)

    def save_parameter_state(self, filename: str) -> NoReturn:
        """Raise: the format `torch` of Megatron's checkpoints holds whole tensors, and ranks keep parts.

        Args:
            filename: where it would be saved.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(f"save_parameter_state({filename!r}): {_TORCH_DIST}")

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> NoReturn:
        """Raise: such files hold the state of Megatron's own optimizer in the order of its buffers.

        Args:
            filename: the file.
            update_legacy_format: of Megatron's own.

        Raises:
            UnsupportedOperationError: always.
        """
        del update_legacy_format
        raise UnsupportedOperationError(
            f"load_parameter_state({filename!r}): the file holds Megatron's buffers. Go on without the optimizer's "
            f"state (--no-load-optim), and {_TORCH_DIST}"
        )

    def save_state_dict_to_file(self, filename: str) -> None:
        """Save what this rank keeps, where whole tensors have owners.

        Args:
            filename: the file, another one on every rank.

        Raises:
            UnsupportedOperationError: no layer-wise sharding is in use.
        """
        self._of_layer_wise("save_state_dict_to_file", filename)

    def load_state_dict_from_file(self, filename: str) -> None:
        """Load what :meth:`save_state_dict_to_file` saved on the rank at this place.

        Args:
            filename: the file of this rank.

        Raises:
            UnsupportedOperationError: no layer-wise sharding is in use.
        """
        self._of_layer_wise("load_state_dict_from_file", filename)

    def _of_layer_wise(self, name: str, filename: str) -> None:
        method = getattr(super(), name, None)
        if method is None:
            raise UnsupportedOperationError(
                f"{name}({filename!r}) is of sharding='layer_wise': {_TORCH_DIST}"
            )
        method(filename)


_classes: dict[type[MegatronOptimizer], type[MegatronOptimizer]] = {}
"""Class of a built optimizer to the one that has Megatron's calls too."""


def _class_with_calls(kind: type[MegatronOptimizer]) -> type[MegatronOptimizer]:
    if issubclass(kind, MegatronCalls):
        return kind
    if kind not in _classes:
        about = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _classes[kind] = type(kind.__name__, (MegatronCalls, kind), about)
    return _classes[kind]


def with_megatron_calls(
    optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], fqn: Callable[[int, str], str]
) -> MegatronOptimizer:
    """Return an optimizer, which has Megatron's calls from then on, with those that it chains.

    The object stays the same one: schedulers, hooks and children know it already.

    Args:
        optimizer: a built optimizer.
        chunks: the model's chunks.
        fqn: maps `(chunk index, local name)` to a globally unique name.
    """
    for each in dict.fromkeys((optimizer, *optimizer.children)):
        each.__class__ = _class_with_calls(type(each))
        each.__dict__["_model"] = (tuple(chunks), fqn)
    return optimizer
