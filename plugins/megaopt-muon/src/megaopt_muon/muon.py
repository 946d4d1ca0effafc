"""Muon for fused, batched and tensor-parallel matrices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, override

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch._compile import _disable_dynamo

from megaopt_core.errors import MegaoptError
from megaopt_core.plugin_api import require_decoupled_if_cautious
from megaopt_muon.arguments import held_number, hold_group, require_plain, validate_arguments
from megaopt_muon.choice.books import GroupBooks
from megaopt_muon.choice.plan_text import joined_plans, parsed_plan
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.copying import Copied
from megaopt_muon.loading import validate_loaded
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.pieces.batches import is_swept
from megaopt_muon.pieces.execution import merged, orthogonalize_pieces
from megaopt_muon.pieces.groups import tensor_parallel_groups
from megaopt_muon.pieces.planner import Planner
from megaopt_muon.step.changes import Change, applied_together
from megaopt_muon.step.local_step import LocalStep, gradient_of, runs_of

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from megaopt_core.config import OptimizerConfig
    from megaopt_core.parallel import ProcessGroupCollection
    from megaopt_muon.choice.methods import MethodBook
    from megaopt_muon.pieces.plans import MatrixPlan
    from megaopt_muon.step.elementwise import Decay

__all__ = ["TensorParallelMuon", "init_state"]


class TensorParallelMuon(Copied, OrthogonalizedOptimizer):
    r"""Muon: momentum whose matrices are orthogonalized before they are applied.

    For parameter :math:`p` with gradient :math:`g` and momentum :math:`m`:

    .. math::
        p &\leftarrow p (1 - \eta \lambda) \\
        m &\leftarrow m + (1 - \mu)(g - m), \qquad u = g + \mu (m - g)
            \text{ with Nesterov, else } u = m \\
        p &\leftarrow p - \eta \, s(r, c) \, \mathrm{NS}(u)

    with learning rate :math:`\eta`, weight decay :math:`\lambda`, momentum :math:`\mu`, the scale :math:`s` of the
    whole logical matrix's rows and columns (:func:`~megaopt_muon.scale.get_muon_scale_factor`) times
    `extra_scale_factor`, and the Newton-Schulz iteration NS
    (:class:`~megaopt_muon.newton_schulz.iteration.NewtonSchulz`).
    Without decoupled weight decay the first line is :math:`g + \lambda p` in place of :math:`g`.

    A tensor that is stepped says by its attribute `param_info` how it is seen as matrices (fused, transposed, batched
    experts) and how tensor parallelism cuts it. Without one, a two-dimensional parameter is one matrix; `is_qkv_fn`
    and `qkv_split_shapes` then describe fused query-key-value weights `[groups x sum, in]`, and the parameter's
    attributes `partition_dim` and `expert_tp` how it is cut.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        momentum: decay rate of the momentum, in [0, 1).
        nesterov: look one step of momentum ahead.
        weight_decay: weight decay coefficient.
        use_decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        split_qkv: orthogonalize query, key and value of a fused weight each by itself.
        is_qkv_fn: says which parameters without `param_info` are such weights.
        qkv_split_shapes: their rows of query, key and value in one query group.
        fp32_matmul_prec: `"medium"` iterates in bfloat16, on accelerators in float16 where coefficients allow it, on
            processors that can multiply neither in float32; `"high"` in TF32 where there is; `"highest"` in float32.
        coefficient_type: coefficient set of the iteration.
        num_ns_steps: number of its steps.
        scale_mode: how the update grows with its matrix.
        extra_scale_factor: factor on every update.
        pg_collection: process groups: an object with attributes `tp` and `expt_tp` (experts; by default `tp`), or a
            DeviceMesh.
        tp_mode: `"blockwise"` orthogonalizes every rank's shard as if it were the matrix; `"duplicated"` gathers the
            matrix on every rank; `"distributed"` sums Gram matrices over the ranks. The last two give what one process
            would, `"distributed"` up to the rounding of these sums: in bfloat16, to bfloat16. `"auto"` takes for each
            parameter the one of the two that a model of its shape expects to be faster.
        norm_eps: least norm that an update is divided by before the iteration. An update below it shrinks.
        ns_method: how the iteration is computed: `"auto"`, `"standard"` or `"gram"`.
        ns_plan: how each shape is iterated, as the key `ns_plan` of a group tells it after a step; what it does not
            name is chosen when it is first met.
        split: `"fused"`: each matrix of a fused weight by itself; `"per_head"`: each attention head too, where the view
            knows heads; `"none"`: weights as they are stored.
        cautious_weight_decay: decay only where update and weight agree in sign, as published by Chen et al.
            (arXiv:2510.12402); also a key of groups.
        coefficients: `(a, b, c)` of each step, for `coefficient_type="custom"`.

    Raises:
        ConfigurationError: an argument is out of range (a `ValueError`).
        ParallelGroupError: a dense parameter is cut, but `pg_collection` holds only the experts' group.
        ViewError: a parameter is a DTensor.

    Source:
        K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
        Scalable for LLM Training" (arXiv:2502.16982).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4, 8))
        >>> optimizer = TensorParallelMuon([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.eye(4, 8)
        >>> _ = optimizer.step()
        >>> bool(weight[0, 0] < 0 and weight[0, 1] == 0)
        True
    """

    _heads_alone: ClassVar[bool] = True
    """Whether what is done with a head needs nothing of another one."""
    noted_by_steps: ClassVar[Mapping[str, Callable[[Sequence[str]], str]]] = {"ns_plan": joined_plans}
    """Keys of groups that say what steps did with the parameters of this rank, and what joins those of several."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[torch.Tensor], bool] | None = None,
        qkv_split_shapes: tuple[int, int, int] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: Any | None = None,
        tp_mode: Literal["blockwise", "duplicated", "distributed", "auto"] = "duplicated",
        *,
        split: str = "fused",
        cautious_weight_decay: bool = False,
        norm_eps: float = 1e-15,
        ns_method: str = "auto",
        ns_plan: str = "",
        coefficients: Sequence[Sequence[float]] | None = None,
    ) -> None:
        validate_arguments(
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "norm_eps": norm_eps,
                "extra_scale_factor": extra_scale_factor,
            },
            {
                "nesterov": nesterov,
                "use_decoupled_weight_decay": use_decoupled_weight_decay,
                "split_qkv": split_qkv,
                "cautious_weight_decay": cautious_weight_decay,
            },
            {
                "fp32_matmul_prec": fp32_matmul_prec,
                "split": split,
                "tp_mode": tp_mode,
                "ns_method": ns_method,
            },
            scale_mode=scale_mode,
            is_qkv_fn=is_qkv_fn,
            qkv_split_shapes=qkv_split_shapes,
        )
        self.newton_schulz = NewtonSchulz(
            resolve_coefficients(coefficient_type, num_ns_steps, coefficients),
            fp32_matmul_prec,
            ns_method,
            held_number("norm_eps", norm_eps),
        )
        self.pg_collection = pg_collection
        self.planner = Planner(
            split,
            split_qkv,
            is_qkv_fn,
            qkv_split_shapes,
            scale_mode,
            held_number("extra_scale_factor", extra_scale_factor),
            tp_mode,
            *tensor_parallel_groups(pg_collection),
        )
        self.books = GroupBooks(self.newton_schulz, ns_plan)
        self.local_step = LocalStep(nesterov, use_decoupled_weight_decay, self.newton_schulz.workspace)
        self._active_book: MethodBook | None = None
        self._squares: dict[int, float] = {}  # squared norms of the updates that were swept, by position
        super().__init__(
            params,
            held_number("lr", lr),
            held_number("momentum", momentum),
            held_number("weight_decay", weight_decay),
            nesterov=nesterov,
            weight_decay_method="decoupled" if use_decoupled_weight_decay else "l2",
            fp32_matmul_prec=fp32_matmul_prec,  # type: ignore[arg-type]
            **self._parent_arguments(),
        )
        own = {
            "ns_plan": ns_plan,
            "cautious_weight_decay": cautious_weight_decay,
            **self._own_group_defaults(),
        }
        self.defaults.update(own)
        for group in self.param_groups:
            for key, value in own.items():
                group.setdefault(key, value)
            self._require_decoupled(group)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings are checked as the constructor's are.

        Args:
            param_group: its parameters and settings; what it does not say is the optimizer's default.

        Raises:
            ConfigurationError: a setting is out of range or not of a group, or its decay is cautious and not decoupled.
            ParallelGroupError: a dense parameter is cut, but the process groups hold only the experts'.
            ViewError: a parameter is a DTensor.
        """
        hold_group(param_group)
        self._require_decoupled({"cautious_weight_decay": False, **self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                require_plain(param)
                self.planner.group_of(param)
        except MegaoptError:
            del self.param_groups[-1]
            raise

    def _require_decoupled(self, group: Mapping[str, Any]) -> None:
        decoupled = self.weight_decay_method == "decoupled"
        require_decoupled_if_cautious(
            group, decoupled, "use_decoupled_weight_decay=False", "decoupled weight decay"
        )

    def _parent_arguments(self) -> dict[str, Any]:
        """Return what the parent's constructor takes beside the settings that both have."""
        return {"scaled_orthogonalize_fn": self._scaled_orthogonalize}

    def _own_group_defaults(self) -> dict[str, float]:
        """Return what a subclass keeps in every group beside Muon's settings."""
        return {}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled or loaded, also of a class, or a version, whose groups have fewer keys.

        Args:
            state: of an optimizer.

        Raises:
            ConfigurationError: a group's `ns_plan` cannot be read, or a number that is loaded is out of its range.
            StateDictError: what is loaded is another optimizer's.
        """
        is_copy = "planner" in state  # not where a state is loaded
        for group in state["param_groups"]:
            parsed_plan(group.get("ns_plan", ""))  # before anything is taken
        if not is_copy:
            self._validate_loaded(state)
        super().__setstate__(state)
        if is_copy:
            self._active_book, self._squares = None, {}
            self.scaled_orthogonalize_fn = self._parent_arguments().get(
                "scaled_orthogonalize_fn", self.newton_schulz
            )
        fewest = {"cautious_weight_decay": False, "ns_plan": "", **self._own_group_defaults()}
        for group in self.param_groups:
            for key, value in fewest.items():
                group.setdefault(key, value)

    def _validate_loaded(self, state: Mapping[str, Any]) -> None:
        """Raise unless what is about to be loaded can be this optimizer's."""
        validate_loaded(state)

    @_disable_dynamo  # compiled, a step falls back to what it is
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient and elements.

        Args:
            closure: evaluates the loss again; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            GradientError: a gradient is sparse or complex.
            ViewError: a parameter is no matrix, or tensor-parallel ranks hold unequal parts of one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [param for param in group["params"] if param.grad is not None]
            self.planner.require_equal_parts(given, heads_alone=self._heads_alone)
            self._init_group(group)
            for params in runs_of([param for param in given if param.numel()]):
                self._step_params(group, params)
        return loss

    @override
    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the orthogonalized and scaled update of one parameter.

        Args:
            p: the parameter; only its attributes and its shape matter.
            grad: the momentum, of the parameter's shape.
            **kwargs: settings of its group; not read.

        Returns:
            A new tensor of the parameter's shape, float32 (float64 for float64 momentum).
        """
        plan = self.planner.plan(p)
        return merged(self.newton_schulz, plan, grad, self._active_book, scaled=True)

    def _step_params(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        self._apply(group, params, self._transform(group, params, self._local_updates(group, params)))

    def _local_updates(self, group: dict[str, Any], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decay parameters, move their momentum, and return what is to be orthogonalized: element by element."""
        grads = [gradient_of(param) for param in params]
        buffers: list[torch.Tensor] = [self.state[param]["momentum_buffer"] for param in params]
        swept = [self._is_swept(param, grad) for param, grad in zip(params, grads, strict=True)]
        late = self._late_decays(group, params)
        early = [late[param.dtype] is None for param in params]
        updates, self._squares = self.local_step.updates(
            group, params, grads, buffers, swept=swept, early=early
        )
        return updates

    def _transform(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]
    ) -> Iterator[Change]:
        """Orthogonalize whole updates; each change is valid until the next is asked for."""
        plans = [self.planner.plan(param) for param in params]
        book = self._active_book = self.books.of(group)
        custom = self._is_customized()
        together = [index for index, plan in enumerate(plans) if not plan.gather_first and not custom]
        for position, number, o in orthogonalize_pieces(
            self.newton_schulz,
            [plans[index] for index in together],
            [updates[index] for index in together],
            book,
            [self._squares.get(index) for index in together],
        ):
            index = together[position]
            piece = plans[index].pieces[number]
            yield Change(index, piece, piece.fold(o.values), o.scale)
        for index in sorted(set(range(len(params))) - set(together)):
            settings = {key: value for key, value in group.items() if key != "params"}
            yield Change(index, None, self.orthogonalize(params[index], updates[index], **settings))
        group["ns_plan"] = book.text

    def _apply(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], changes: Iterable[Change]
    ) -> None:
        """Subtract what was transformed, times the learning rate: element by element."""
        workspace, decays = self.newton_schulz.workspace, self._late_decays(group, params)
        # A CPU uses the memory of a change again, and what a subclass does to one parameter goes before the next.
        together = all(param.device.type != "cpu" for param in params) and not self._is_customized()
        if together and not isinstance(group["lr"], torch.Tensor):
            changes = applied_together(changes, params, group["lr"], decays)
        for change in changes:
            param = params[change.index]
            decay = decays[param.dtype]
            if change.piece is None:
                self.pre_weight_update_fn_inplace(param, change.values)
            change.apply(param, group["lr"], workspace, decay)
            if change.piece is None:
                self.post_weight_update_fn_inplace(param)

    def _is_swept(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether an update is written in 16 bits while it is made: where its matrices are iterated so, one by one."""
        plan = self.planner.plan(param)
        return not self._is_customized() and is_swept(self.newton_schulz, plan, param, grad)

    def _late_decays(
        self, group: dict[str, Any], params: Sequence[torch.Tensor]
    ) -> dict[torch.dtype, Decay | None]:
        custom = self._is_customized()
        dtypes = {param.dtype for param in params}
        return {dtype: self.local_step.late_decay(group, dtype, is_customized=custom) for dtype in dtypes}

    def agree(self, pg_collection: ProcessGroupCollection) -> None:
        """Choose from the rates of the first rank, on all ranks of the process groups: they all call it.

        Building an optimizer does it. Who constructs this class himself calls it where ranks step the same matrices:
        without it nothing is measured among ranks.

        Args:
            pg_collection: the process groups; without any of several ranks each process goes by what it knows.

        Raises:
            ConfigurationError: `MEGAOPT_CALIBRATION` names a file that cannot be read.
            PluginError: this rank is the first, and cannot measure.
            RoutingError: another rank fails in one of these ways.
        """
        self.books.agree(pg_collection, [param for group in self.param_groups for param in group["params"]])

    def _is_customized(self) -> bool:
        cls: Hashable = type(self)  # type: ignore[assignment] # mypy asks the class's instances
        return _is_customized(cls)

    @property
    def known_plans(self) -> dict[str, MatrixPlan]:
        """What is done with each named parameter, as far as it was stepped."""
        return self.planner.known

    def _scaled_orthogonalize(self, grad: torch.Tensor) -> torch.Tensor:
        """Orthogonalize and scale a plain matrix: what the base class calls for one."""
        return self.newton_schulz(grad).to(grad.dtype) * self.planner.scale(grad.shape[-2], grad.shape[-1])


@cache
def _is_customized(cls: Hashable) -> bool:
    """Whether a subclass replaces what is done per parameter: asked several times for each."""
    owners = {
        "orthogonalize": TensorParallelMuon,
        "pre_weight_update_fn_inplace": OrthogonalizedOptimizer,
        "post_weight_update_fn_inplace": OrthogonalizedOptimizer,
    }
    return any(getattr(cls, name) is not getattr(owner, name) for name, owner in owners.items())


def init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make the state of every parameter, without a gradient and without moving a parameter.

    Args:
        optimizer: a Muon.
        config: not read.
    """
    del config
    assert isinstance(optimizer, OrthogonalizedOptimizer)  # noqa: S101 - the entry pairs this function with its class
    for group in optimizer.param_groups:
        optimizer._init_group(group, skip_non_grad_params=False)
