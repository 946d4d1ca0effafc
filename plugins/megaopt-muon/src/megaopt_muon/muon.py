"""Muon for fused, batched and tensor-parallel matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, override

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

from megaopt_core.errors import MegaoptError
from megaopt_core.plugin_api import require_decoupled_if_cautious
from megaopt_muon.arguments import held_number, hold_group, require_plain, validate_arguments
from megaopt_muon.choice.books import GroupBooks
from megaopt_muon.choice.plan_text import joined_plans, parsed_plan
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.copying import Copied
from megaopt_muon.loading import validate_loaded
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.pieces.groups import tensor_parallel_groups
from megaopt_muon.pieces.planner import Planner
from megaopt_muon.step.local_step import LocalStep
from megaopt_muon.step.matrix_steps import MatrixSteps

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from megaopt_core.config import OptimizerConfig
    from megaopt_core.parallel import ProcessGroupCollection
    from megaopt_muon.choice.methods import MethodBook
    from megaopt_muon.pieces.plans import MatrixPlan

__all__ = ["TensorParallelMuon", "init_state"]


class TensorParallelMuon(Copied, MatrixSteps):
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

    @property
    def known_plans(self) -> dict[str, MatrixPlan]:
        """What is done with each named parameter, as far as it was stepped."""
        return self.planner.known

    def _scaled_orthogonalize(self, grad: torch.Tensor) -> torch.Tensor:
        """Orthogonalize and scale a plain matrix: what the base class calls for one."""
        return self.newton_schulz(grad).to(grad.dtype) * self.planner.scale(grad.shape[-2], grad.shape[-1])


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
