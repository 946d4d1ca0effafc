"""`LayerWiseDistributedOptimizer`: the chain that a model sharded by whole matrices gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ProcessGroupCollection,
)
from megaopt_core.errors import ConfigurationError
from megaopt_core.parallel import size_of
from megaopt_core.sharding import FullParamLayout, wrappers_of
from megaopt_layerwise.narrowing import (
    holds_experts,
    is_replicated,
    layouts_of,
    narrowed,
    owners_by_layout,
    owners_by_ping_pong,
    wrapped,
)
from megaopt_layerwise.owned_params import OwnedParams
from megaopt_layerwise.padded_layout import (
    compute_full_param_layout,
    compute_per_buffer_param_layout,
    shard_divisor,
)
from megaopt_layerwise.params import LayerWiseParams
from megaopt_layerwise.rank_file import load_rank_file, raise_together, save_rank_file

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LayerWiseDistributedOptimizer"]

type _ParamLists = list[list[torch.nn.Parameter]]


class LayerWiseDistributedOptimizer(ChainedOptimizer):
    """Steps several optimizers as one, whose parameters have an owner each; values are gathered after the step.

    `build_optimizer(..., sharding="layer_wise")` returns it. Made by hand, it takes optimizers that step everything on
    every rank, and narrows each to what this rank owns: by `full_param_layout` of wrapped chunks in which no parameter
    crosses a share, else by size, forwards and backwards over the ranks. Such optimizers need whole gradients on every
    rank.

    Args:
        optimizers: built for layer-wise sharding, or wrapped by hand, or plain torch optimizers. A list is changed: it
            holds the narrowed ones afterwards.
        config: the run's configuration.
        pg_collection: process groups, or a DeviceMesh that names them; None: the default group.
        init_state_fn_list: one `(optimizer, config)` an optimizer, which makes the state of what this rank owns.
        model_chunks: the model; wrapped chunks tell their layouts and reduce gradients.

    Raises:
        ConfigurationError: `init_state_fn_list` has another length than `optimizers`.

    Example:
        >>> import torch
        >>> from megaopt_core import OptimizerConfig
        >>> from megaopt_layerwise import LayerWiseDistributedOptimizer
        >>> layer = torch.nn.Linear(2, 1)
        >>> config = OptimizerConfig(lr=0.1, clip_grad=0.0)
        >>> optimizer = LayerWiseDistributedOptimizer([torch.optim.SGD(layer.parameters(), lr=0.1)], config)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step().update_successful
        True
    """

    def __init__(
        self,
        optimizers: Sequence[MegatronOptimizer | torch.optim.Optimizer],
        config: OptimizerConfig,
        pg_collection: ProcessGroupCollection | DeviceMesh | None = None,
        init_state_fn_list: Sequence[Callable[..., None] | None] | None = None,
        model_chunks: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        if init_state_fn_list is not None and len(init_state_fn_list) != len(optimizers):
            raise ConfigurationError(
                f"init_state_fn_list has {len(init_state_fn_list)} functions for {len(optimizers)} optimizers",
                setting="init_state_fn_list",
                value=init_state_fn_list,
            )
        self._pgs = ProcessGroupCollection.of(pg_collection)
        self._chunks = [_with_layout(chunk) for chunk in model_chunks or ()]
        self.dp_cp_params_list: _ParamLists = []
        self.expt_dp_params_list: _ParamLists = []
        self.bucket_params_lists: dict[Any, _ParamLists] = {}
        children = [wrapped(optimizer, config, self._pgs) for optimizer in optimizers]
        self.shard_params(children, layouts_of(self._chunks))
        if isinstance(optimizers, list):
            optimizers[:] = children
        for child, make in zip(children, init_state_fn_list or (), strict=False):
            if make is not None:
                make(child.parts[0].inner, config)
        super().__init__(children)

    # Who owns what.

    _shard_divisor = staticmethod(shard_divisor)
    _compute_per_buffer_param_layout = staticmethod(compute_per_buffer_param_layout)
    compute_full_param_layout = staticmethod(compute_full_param_layout)

    def shard_params(
        self,
        optimizers: list[MegatronOptimizer],
        full_param_layouts: Sequence[FullParamLayout] | None = None,
    ) -> None:
        """Narrow optimizers to what this rank owns; those that are sharded already stay as they are.

        Args:
            optimizers: each is replaced in this list by the narrowed one.
            full_param_layouts: one a model chunk, in which no parameter crosses a share; None: by size, ping-pong.

        Raises:
            ShardingError: a layout lacks a parameter, or cuts one.
        """
        for is_expert in (False, True):
            group = self._pgs.shard_group(is_expert=is_expert)
            of_kind = [
                index
                for index, child in enumerate(optimizers)
                if is_replicated(child) and holds_experts(child) is is_expert
            ]
            params = [param for index in of_kind for param in optimizers[index].names]
            owned: _ParamLists
            if full_param_layouts is None:
                owned = owners_by_ping_pong(params, size_of(group))
            else:
                owned = owners_by_layout(params, size_of(group), full_param_layouts, self._chunks)
            if is_expert:
                self.expt_dp_params_list = owned
            else:
                self.dp_cp_params_list = owned
            for index in of_kind:
                optimizers[index] = narrowed(
                    optimizers[index], owned, self._pgs, self._chunks, is_expert=is_expert
                )

    def set_bucket_layerwise_params_list(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Find out for each bucket of wrapped chunks which of its parameters each rank owns.

        `bucket_params_lists` holds the answer, by bucket. Buckets gather the shares of ranks as they lie in memory, so
        that nothing in a step needs it.

        Args:
            model_chunks: chunks that `DistributedDataParallel` wraps.
        """
        for chunk in model_chunks:
            wrapper: Any = chunk
            for key, buffer in wrapper.param_and_grad_buffers.items():
                ranks = size_of(self._pgs.shard_group(is_expert=key.is_expert))
                for index, bucket in enumerate(buffer.buckets):
                    owned: _ParamLists = [[] for _ in range(ranks)]
                    ends = buffer.layout.ends(index, ranks)
                    for name, (begin, _) in buffer.layout.param_ranges.items():
                        if buffer.layout.bucket_of[name] == index:
                            place = next((rank for rank, stop in enumerate(ends) if begin < stop), ranks - 1)
                            owned[place].append(buffer.params[name])
                    self.bucket_params_lists[bucket] = owned

    # Bringing values to all ranks.

    @torch.no_grad()
    def allgather_params(self) -> None:
        """Bring the values of every owner to all ranks, and return when they are there."""
        for part in self.parts:
            part.sharded.start_param_sync()
        for part in self.parts:
            part.sharded.finish_param_sync()
            if isinstance(part.sharded, LayerWiseParams):
                part.sharded.memory.gathering.finish()

    def broadcast_params(self) -> None:
        """Bring the values of every owner to all ranks, as :meth:`allgather_params` does."""
        self.allgather_params()

    @torch.no_grad()
    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Begin to gather the parameters that have owners; those of other strategies stay as they are."""
        for part in self.parts:
            if isinstance(part.sharded, LayerWiseParams | OwnedParams):
                part.sharded.start_param_sync()

    # Norms: one reduction over all ranks that hold a part of the model.

    def _get_grad_norm_for_group(self, grad_norm_group: str) -> float:
        """Return the separate norm of the collected gradients of one group; 0 where nobody has such parameters.

        Args:
            grad_norm_group: its name.
        """
        self.get_grad_norm()
        return self.grad_norms.get(grad_norm_group, 0.0)

    # State.

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load a state dict, and gather parameters before anything reads them.

        Args:
            state_dict: what `state_dict` or :meth:`sharded_state_dict` returned.
            strict: every parameter must be in the state dict and the other way round.

        Raises:
            StateDictError: names or shapes do not fit, here or on another rank.
        """
        with torch.no_grad():
            for part in self.parts:
                part.sharded.take_model_values()
        failure = None
        try:
            if set(state_dict) == {"state", "description"}:
                self.checkpoint_state().load_state_dict(state_dict)
            else:
                super().load_state_dict(state_dict, strict=strict)
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            failure = error
        raise_together(self, failure)
        self.allgather_params()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any] | None = None,
        is_loading: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the state as slices of named parameters, which torch.distributed.checkpoint saves and loads.

        Any number of ranks and any strategy loads it, also where no parameter is sharded: a collective.

        Args:
            model_sharded_state_dict: taken for the sake of code that moves over; slices carry their own names.
            is_loading: state exists from build on, so that a load needs nothing else.
            **kwargs: of other formats; none is read.
        """
        del model_sharded_state_dict, is_loading, kwargs
        return dict(self.checkpoint_state().state_dict())

    def save_state_dict_to_file(self, filename: str) -> None:
        """Save what this rank keeps: a file a rank, for the same world.

        Args:
            filename: the file, another one on every rank.
        """
        save_rank_file(self, filename)

    def load_state_dict_from_file(self, filename: str) -> None:
        """Load what :meth:`save_state_dict_to_file` saved on the rank at this place.

        Args:
            filename: the file of this rank.

        Raises:
            StateDictError: it is of another rank or world, or of another plan of owners; another rank cannot load its
                file. Nothing has changed on any rank then.
            OSError: the file cannot be read.
        """
        load_rank_file(self, filename)


def _with_layout(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the wrapper that scatters a chunk's gradients, wherever it is; the chunk where there is none."""
    found: list[Any] = [wrapper for wrapper in wrappers_of([chunk]) if wrapper.scatters_grads]
    return found[0] if len(found) == 1 else chunk
