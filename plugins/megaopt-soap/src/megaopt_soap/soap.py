"""SOAP for plain, fused and batched matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, override

import torch

from megaopt_core.plugin_api import dense_gradient, require_argument
from megaopt_soap.long_steps import LongSteps
from megaopt_soap.precision import matmul_precision
from megaopt_soap.settings import FIRST_STEPS, MATMUL_PRECISIONS
from megaopt_soap.state import (
    SCALARS,
    make_state,
    matrices_of,
    require_same_sides,
    states_of,
    view_of,
)
from megaopt_soap.update import StepSettings, step_matrix

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from megaopt_core import OptimizerConfig

__all__ = ["SOAP", "init_state"]

_ATTRIBUTES = (
    "use_kl_shampoo",
    "max_precond_dim",
    "orthogonalize",
    "extra_scale_factor",
    "first_step",
    "fp32_matmul_prec",
    "max_update_rms",
)
"""Settings that are the same for all groups."""


class SOAP(torch.optim.Optimizer):
    r"""SOAP: Adam in the eigenbases of Shampoo's Kronecker factors.

    For a matrix :math:`P` of `r` rows and `c` columns with gradient :math:`G`, in step `t`:

    .. math::
        L &\leftarrow L + w_t (G G^\top - L), \qquad R \leftarrow R + w_t (G^\top G - R), \qquad
            w_t = (1 - \beta_s) / (1 - \beta_s^t) \\
        Q_L &\leftarrow \text{eigenvectors of } L, \qquad Q_R \leftarrow \text{eigenvectors of } R \\
        M &\leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
            V \leftarrow \beta_2 V + (1 - \beta_2) (Q_L G Q_R^\top)^2 \\
        P &\leftarrow P (1 - \eta \lambda) - \eta \, Q_L^\top
            \frac{Q_L M Q_R^\top / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon} Q_R

    with eigenvectors as rows, largest eigenvalue first. They are computed in the first step; in every
    `precondition_frequency`-th after it one step of power iteration and a QR decomposition bring them up to date, and
    :math:`V` follows their order. With KL-Shampoo, for the eigenvalues :math:`\Lambda` before this step,

    .. math::
        L \leftarrow L + w_t (G Q_R^\top \Lambda_R^{-1} Q_R G^\top / c - L), \qquad
        R \leftarrow R + w_t (G^\top Q_L^\top \Lambda_L^{-1} Q_L G / r - R).

    A tensor that is stepped says by its attribute `param_info` how it is seen as matrices (fused, transposed, batched
    experts): each has bases of its own. Without one, a parameter of two or more dimensions is one matrix. State is kept
    in float32, for float64 parameters in float64.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        betas: decay rates of momentum and second moment, each in [0, 1).
        shampoo_beta: decay rate of the Kronecker factors, in [0, 1).
        eps: keeps the division by the second moment finite; with KL-Shampoo the least eigenvalue that is divided by.
        weight_decay: weight decay coefficient; decay is decoupled.
        cautious_weight_decay: decay only where update and weight agree in sign, as published by Chen et al.
            (arXiv:2510.12402); also a key of groups.
        precondition_frequency: number of steps from one refresh of the bases to the next.
        use_kl_shampoo: weigh what each factor takes of a gradient by the other factor's inverse.
        max_precond_dim: largest dimension that gets a basis; a matrix with two larger ones is stepped as by Adam.
        orthogonalize: orthogonalize each update as Muon does, and scale it by `extra_scale_factor` times
            :math:`\sqrt{\max(r, c)}`.
        extra_scale_factor: factor on orthogonalized updates.
        first_step: `"update"`: the first gradient sets the bases and is applied in them; `"initialize"`: it only sets
            the bases, by :math:`G G^\top` and :math:`G^\top G`, and moments begin with the second one, as published.
        fp32_matmul_prec: precision of float32 products, a name that `torch.set_float32_matmul_precision` takes. Bases
            are refreshed in `"highest"`.
        max_update_rms: largest root mean square of a matrix's update, as a multiple of the learning rate: a longer one
            is scaled down to it, :math:`U \leftarrow U \min(1, \rho / \text{rms}(U))`, before weight decay. None: no
            bound. A step above 10 is warned of, once.

    Raises:
        ConfigurationError: an argument is out of range (a `ValueError`).

    Source:
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv:2409.11321), algorithm 3; Lin et al.,
        "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization" (arXiv:2509.03378).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> optimizer = SOAP([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.eye(2, 3)
        >>> _ = optimizer.step()
        >>> [[round(value, 4) for value in row] for row in weight.tolist()]
        [[-0.1, 0.0, 0.0], [0.0, -0.1, 0.0]]
    """

    why_not_captured: ClassVar[str] = (
        "it counts its steps on the host, and does other work in those that refresh its bases, which a graph would not"
    )
    """What `optimizer_cuda_graph=True` is answered."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        cautious_weight_decay: bool = False,
        precondition_frequency: int = 1,
        use_kl_shampoo: bool = False,
        max_precond_dim: int = 10_000,
        orthogonalize: bool = False,
        extra_scale_factor: float = 0.2,
        first_step: str = "update",
        fp32_matmul_prec: str = "high",
        max_update_rms: float | None = None,
    ) -> None:
        require_argument(float(lr) >= 0, "lr", lr, "at least 0")
        require_argument(
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "betas", betas, "two numbers in [0, 1)"
        )
        require_argument(0 <= shampoo_beta < 1, "shampoo_beta", shampoo_beta, "at least 0 and less than 1")
        require_argument(eps > 0, "eps", eps, "greater than 0")
        require_argument(weight_decay >= 0, "weight_decay", weight_decay, "at least 0")
        require_argument(
            precondition_frequency >= 1, "precondition_frequency", precondition_frequency, "at least 1"
        )
        require_argument(max_precond_dim >= 0, "max_precond_dim", max_precond_dim, "at least 0")
        require_argument(extra_scale_factor > 0, "extra_scale_factor", extra_scale_factor, "greater than 0")
        require_argument(first_step in FIRST_STEPS, "first_step", first_step, f"one of {FIRST_STEPS}")
        require_argument(
            fp32_matmul_prec in MATMUL_PRECISIONS,
            "fp32_matmul_prec",
            fp32_matmul_prec,
            f"one of {MATMUL_PRECISIONS}",
        )
        require_argument(
            max_update_rms is None or max_update_rms > 0,
            "max_update_rms",
            max_update_rms,
            "greater than 0, or None",
        )
        self.use_kl_shampoo = use_kl_shampoo
        self.max_precond_dim = max_precond_dim
        self.orthogonalize = orthogonalize
        self.extra_scale_factor = extra_scale_factor
        self.first_step = first_step
        self.fp32_matmul_prec = fp32_matmul_prec
        self.max_update_rms = max_update_rms
        self._long_steps = LongSteps()
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "cautious_weight_decay": cautious_weight_decay,
            "precondition_frequency": precondition_frequency,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the loss again; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            GradientError: a gradient is sparse or complex.
            CheckpointMismatchError: state was loaded that other settings made; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, state in self.state.items():
            if state:
                self._require_own(param, state)
        with matmul_precision(self.fp32_matmul_prec):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None and param.numel():
                        self._step_param(param, dense_gradient("SOAP", param), group)
        self._long_steps.end_step()
        return loss

    @torch.no_grad()
    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; state keeps its dtype, and numbers stay on the CPU.

        Args:
            state_dict: of an optimizer with the same groups, `use_kl_shampoo` and `max_precond_dim`.

        Raises:
            CheckpointMismatchError: it is of other settings; nothing has changed then.
        """
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(keys, params, strict=False):  # torch tells of other groups
            if state := state_dict["state"].get(key):
                self._require_own(param, state)
        super().load_state_dict(state_dict)
        for key, param in zip(keys, params, strict=True):
            for name, value in (
                state_dict["state"].get(key, {}).items()
            ):  # torch casts to the parameter's dtype
                device = torch.device("cpu") if name in SCALARS else param.device
                self.state[param][name] = value.to(device, copy=True)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of; torch knows of groups and state only."""
        settings = {name: getattr(self, name) for name in _ATTRIBUTES}
        return {**super().__getstate__(), **settings, "_long_steps": LongSteps()}

    def make_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state, which is made where it is missing.

        Args:
            param: one of this optimizer's.
        """
        state: dict[str, Any] = self.state[param]
        if not state:
            state.update(
                make_state(param, max_precond_dim=self.max_precond_dim, with_eigenvalues=self.use_kl_shampoo)
            )
        return state

    def _require_own(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        require_same_sides(
            param, state, max_precond_dim=self.max_precond_dim, with_eigenvalues=self.use_kl_shampoo
        )

    def _step_param(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.make_state(param)
        state["step"] += 1
        settings = StepSettings(
            step=int(state["step"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            shampoo_beta=group["shampoo_beta"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            frequency=group["precondition_frequency"],
            was_rotated=bool(state["exp_avg_is_rotated"]),
            updates_first=self.first_step == "update",
            scale=self.extra_scale_factor if self.orthogonalize else None,
            cautious=bool(group.get("cautious_weight_decay")),
            max_rms=self.max_update_rms,
        )
        targets = matrices_of(param, param)
        # In plain order: products round otherwise in another, and Adam makes a step of what is zero but for rounding.
        grads = matrices_of(param, grad.contiguous().to(state["exp_avg"].dtype))
        for number, member, matrix_state in states_of(state, [target.shape for target in targets]):
            size = step_matrix(targets[number][member], grads[number][member], matrix_state, settings)
            self._long_steps.add(param, size)
        state["exp_avg_is_rotated"].fill_(settings.rotates_momentum)
        if any(
            target.untyped_storage().data_ptr() != param.untyped_storage().data_ptr() for target in targets
        ):
            view = view_of(param)
            merged = targets[0] if view is None else view.merge(targets, param.shape)
            param.copy_(merged.view(param.shape))


@torch.no_grad()
def init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make the state of every parameter, without a gradient and without moving a parameter.

    Args:
        optimizer: a SOAP.
        config: not read.
    """
    del config
    assert isinstance(optimizer, SOAP)  # noqa: S101 - the entry pairs this function with its class
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.numel():
                optimizer.make_state(param)
