"""Checks of readers of models: plugins that say what the parameters of a model are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from megaopt_core.errors import ConformanceError, ViewError
from megaopt_core.params import Doubt, MatrixView, Role, RoleDecision
from megaopt_core.registry import LoadedPlugin
from megaopt_testing.check import Check, Kind, subject
from megaopt_testing.models import SharedBlocks, TinyGPT
from megaopt_testing.process_state import process_settings, random_states
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import some

__all__ = ["ROLE_CHECKS", "check_any_model", "check_meta_alike", "check_model_untouched", "check_reasons"]

type ModelFactory = Callable[[], nn.Module]
type _Answer = Mapping[str, Any]


class _Odd(nn.Module):
    """Parameters that no module class of torch owns: bare ones, a list, a number, a frozen one, an empty one."""

    ELEMENTWISE = frozenset({"gain", "table", "list.1", "frozen"})

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.randn(5, 4))
        self.list = nn.ParameterList([torch.randn(4, 4), torch.zeros(4)])
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("running", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return something of the shape of the inputs, `[batch, 4]`."""
        found: torch.Tensor = self.gain * (inputs @ self.list[0] + self.list[1]) + self.table.sum(0)
        return found


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 2)
    )


def _recurrent() -> nn.Module:
    return nn.ModuleDict({"table": nn.EmbeddingBag(7, 6), "gru": nn.GRU(6, 5), "lstm": nn.LSTM(5, 4)})


_MODELS: tuple[ModelFactory, ...] = (
    TinyGPT,
    lambda: TinyGPT(tied=True),
    lambda: TinyGPT(width=8, layers=1),  # of a class that has been asked about, in another size
    lambda: SharedBlocks(tied=True),
    lambda: nn.TransformerEncoderLayer(8, 2, 16),
    _convolutions,
    _recurrent,
    _Odd,
    lambda: nn.Linear(3, 3),
    nn.Identity,
)


def _fail(plugin: str, message: str) -> NoReturn:
    raise ConformanceError(message, optimizer=plugin)


def _models(models: Iterable[ModelFactory]) -> Iterator[tuple[str, ModelFactory]]:
    for make in (*models, *_MODELS):
        yield type(_made(make)).__name__, make


def _made(make: ModelFactory, device: str = "cpu") -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return make()


def _ask(plugin: str, model: nn.Module) -> dict[str, Any]:
    """Return what the plugin's hook says, whatever type it is of."""
    reader: LoadedPlugin = subject(Kind.ROLES, plugin)
    found: dict[str, Any] = {}
    for answer in reader.ask("megaopt_annotate_params", model_chunk=model, example=None, no_forward=""):
        if not isinstance(answer, Mapping):
            _fail(
                plugin, f"it returns {type(answer).__name__}; it must return {{qualified name: what it is}}"
            )
        found.update(answer)
    return found


def check_any_model(plugin: str, models: Iterable[ModelFactory] = ()) -> None:
    """It answers for models that it does not know, and only names parameters that there are, as what they can be.

    A reader is asked about every model that anybody builds an optimizer for.

    Args:
        plugin: the plugin's name.
        models: functions that make models which it should know; of each it has to say something.

    Raises:
        ConformanceError: it raises, names what is no parameter, answers something else than a `Role`, a `MatrixView` or
            a `RoleDecision`, gives a view that does not fit the shape, says for certain what cannot be, contradicts
            itself of a tied parameter, or has nothing to say of a model that it knows.
    """
    known = len(list(models))
    for index, (name, make) in enumerate(_models(models)):
        model = _made(make)
        try:
            answer = _ask(plugin, model)
        except ConformanceError:
            raise
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            _fail(
                plugin,
                f"it raises {type(error).__name__}: {error}, on {name}; leave out parameters that it does not know",
            )
        if index < known and not answer:
            _fail(plugin, f"it does not recognize {name}, although the test declares that it does")
        params = dict(model.named_parameters(remove_duplicate=False))
        for param, said in answer.items():
            if param not in params:
                _fail(plugin, f"it names {param!r} of {name}, which is not a parameter: {some(params)}")
            _require_fit(plugin, f"{param!r} of {name}", said, params[param])
            _require_possible(plugin, model, name, param, said)
        _require_one_answer(plugin, name, params, answer)


_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def _require_possible(plugin: str, model: nn.Module, name: str, param: str, said: Any) -> None:
    """Compare what is said for certain with what a module of torch's own, or the number of dimensions, allows."""
    role = (
        said.role if isinstance(said, RoleDecision) else Role.MATRIX if isinstance(said, MatrixView) else said
    )
    if isinstance(said, RoleDecision) and said.view is not None and role is not Role.MATRIX:
        _fail(
            plugin,
            f"it gives {param!r} of {name} the role {role.value} and a view: only matrices have a view",
        )
    if isinstance(said, RoleDecision) and said.doubt is Doubt.ROLE:
        return
    owner = model.get_submodule(param.rpartition(".")[0])
    tensor = model.get_parameter(param)
    wrong = None
    if role is Role.MATRIX and tensor.ndim < 2:
        wrong = f"has {tensor.ndim} dimensions"
    elif role is Role.MATRIX and isinstance(owner, _TABLES):
        wrong = f"is a table that {type(owner).__name__} indexes"
    elif role is Role.MATRIX and isinstance(owner, _Odd) and param in _Odd.ELEMENTWISE:
        wrong = "is multiplied with nothing"
    elif role is not Role.ELEMENTWISE and isinstance(owner, _NORMS):
        wrong = f"is a gain or bias of {type(owner).__name__}"
    if wrong is not None:
        _fail(
            plugin,
            f"it is certain that {param!r} of {name} is {role.value}, but the parameter {wrong}. Leave it "
            "out, or return a guess with doubt=Doubt.ROLE",
        )


def _require_one_answer(plugin: str, model: str, params: Mapping[str, torch.Tensor], answer: _Answer) -> None:
    """Compare what is said of a tensor under each of its names."""
    of_tensor: dict[int, tuple[str, Role]] = {}
    for name, said in answer.items():
        role = (
            said.role
            if isinstance(said, RoleDecision)
            else Role.MATRIX
            if isinstance(said, MatrixView)
            else said
        )
        first, other = of_tensor.setdefault(id(params[name]), (name, role))
        if role is not other and not (role.is_embedding_or_output and other.is_embedding_or_output):
            _fail(
                plugin,
                f"it gives {first!r} of {model} the role {other.value} and {name!r} the role {role.value}: "
                "they are one parameter",
            )


def _require_fit(plugin: str, what: str, said: Any, param: torch.Tensor) -> None:
    if not isinstance(said, Role | MatrixView | RoleDecision):
        _fail(
            plugin,
            f"it returns {said!r} for {what}; it must return a Role, a MatrixView or a RoleDecision",
        )
    view = said if isinstance(said, MatrixView) else getattr(said, "view", None)
    if view is None:
        return
    try:
        elements = sum(matrix.numel() for matrix in view.matrices(torch.empty_like(param, device="meta")))
    except (ViewError, ValueError, RuntimeError, IndexError) as error:
        _fail(plugin, f"its view of {what} does not fit the shape {tuple(param.shape)}: {error}")
    if elements != param.numel():
        _fail(plugin, f"its view of {what} has {elements} elements, the parameter {param.numel()}")


def check_meta_alike(plugin: str, models: Iterable[ModelFactory] = ()) -> None:
    """It says of a model on the meta device what it says of the same model with values, and says it again.

    Plans are made on the meta device before there are values.

    Args:
        plugin: the plugin's name.
        models: functions that make models which it should know.

    Raises:
        ConformanceError: the answers differ.
    """
    for name, make in _models(models):
        model = _made(make)
        real, again, meta = _ask(plugin, model), _ask(plugin, model), _ask(plugin, _made(make, "meta"))
        for other, how in ((again, "when it is asked again"), (meta, "on the meta device")):
            different = [param for param in {**real, **other} if _told(real, param) != _told(other, param)]
            if different:
                _fail(
                    plugin,
                    f"it gives another answer for {some(different)} of {name} {how}; read only modules and shapes",
                )


def _told(answer: _Answer, param: str) -> Any:
    said = answer.get(param)
    return (said.role, said.view, said.doubt) if isinstance(said, RoleDecision) else said


def check_model_untouched(plugin: str, models: Iterable[ModelFactory] = ()) -> None:
    """It leaves the model as it was: values, attributes, gradients, modes, hooks, and the random state.

    Args:
        plugin: the plugin's name.
        models: functions that make models which it should know.

    Raises:
        ConformanceError: something has changed.
    """
    for name, make in _models(models):
        model = _made(make)
        before, random, settings = _everything(model), random_states(), process_settings()
        _ask(plugin, model)
        sets = [key for key, value in process_settings().items() if value != settings[key]]
        if sets:
            _fail(plugin, f"reading {name} changes a setting of the whole process: {some(sets)}")
        after = _everything(model)
        changed = [key for key in {**before, **after} if not same_bits(before.get(key), after.get(key))]
        if changed:
            _fail(plugin, f"reading {name} changes {some(changed)}; a reader must change nothing")
        drawn = [key for key, state in random_states().items() if state != random.get(key, state)]
        if drawn:
            _fail(
                plugin,
                f"reading {name} draws random numbers ({some(drawn)}), so the rest of the run changes",
            )


def _everything(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        where = name or "the model"
        found[f"the mode of {where}"] = module.training
        found[f"the hooks of {where}"] = sum(
            len(hooks) for key, hooks in vars(module).items() if key.endswith("_hooks") and hooks is not None
        )
        found[f"the attributes of {where}"] = tuple(sorted(vars(module)))
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str | tuple):
                found[f"the attribute {key} of {where}"] = value
    for name, param in model.named_parameters(remove_duplicate=False):
        found[f"the values of {name}"] = param.detach().clone()
        found[f"which tensor {name} is"] = id(param)
        found[f"the hooks of {name}"] = len(param._backward_hooks or ())
        found[f"the gradient of {name}"] = param.grad is not None
        found[f"requires_grad of {name}"] = param.requires_grad
        found[f"the attributes of {name}"] = tuple(sorted(vars(param)))
    found.update({f"the buffer {name}": buffer.clone() for name, buffer in model.named_buffers()})
    return found


def check_reasons(plugin: str, models: Iterable[ModelFactory] = ()) -> None:
    """Every decision has a reason in words, which reports show.

    Args:
        plugin: the plugin's name.
        models: functions that make models which it should know.

    Raises:
        ConformanceError: a `RoleDecision` has none.
    """
    for name, make in _models(models):
        answer = _ask(plugin, _made(make))
        silent = [
            p for p, said in answer.items() if isinstance(said, RoleDecision) and not said.reason.strip()
        ]
        if silent:
            _fail(plugin, f"it gives no reason for {some(silent)} of {name}")


ROLE_CHECKS: tuple[Check, ...] = (
    Check(
        "any_model",
        "it answers for any model, and gives each parameter a possible role",
        check_any_model,
        hint="leave out what it does not know, and name parameters as named_parameters() does",
        kind=Kind.ROLES,
    ),
    Check(
        "meta_alike",
        "it gives the same answer on the meta device, and when it is called again",
        check_meta_alike,
        hint="go by modules, shapes and sources, never by values",
        kind=Kind.ROLES,
    ),
    Check(
        "model_untouched",
        "it leaves the model unchanged",
        check_model_untouched,
        hint="return what it finds; set nothing on modules or parameters",
        kind=Kind.ROLES,
    ),
    Check(
        "reasons",
        "every decision has a reason in words",
        check_reasons,
        hint='RoleDecision(role, "why, in words")',
        kind=Kind.ROLES,
    ),
)
"""Every check of readers of models."""
