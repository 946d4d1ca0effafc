"""The record by which a plugin offers an optimizer."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import Attribute, Factory, evolve, field, frozen
from attrs.converters import optional

from megaopt_core.errors import PluginError
from megaopt_core.params._keys import ParamKey
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._specs import DEFAULT_ALIGNMENT, Granularity, ParamSpec
from megaopt_core.params._views import MatrixView
from megaopt_core.plugin_api._declared_state import DeclaredState, StateKind

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.sharding._split_step import SplitStep

__all__ = [
    "SCALAR_STATES",
    "ConfigToKwargs",
    "InitState",
    "MupRule",
    "OptimizerEntry",
    "SplitRefusal",
    "SplitStepFactory",
]

SCALAR_STATES = frozenset({"step"})
"""State keys that torch's optimizers keep one number of for every parameter."""

_DTYPE_SETTINGS = {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}

type ConfigToKwargs = Callable[
    [OptimizerConfig, Sequence[torch.nn.Module], ProcessGroupCollection | None], Mapping[str, Any]
]
type MupRule = Callable[[OptimizerConfig, float], Mapping[ParamKey, ParamGroupOverride]]
type SplitStepFactory = Callable[[torch.optim.Optimizer], SplitStep]
type InitState = Callable[[torch.optim.Optimizer, OptimizerConfig | None], None]
type GranularityRule = Callable[[OptimizerConfig], Granularity]
type SplitRefusal = Callable[[OptimizerConfig], str | None]


def _prefixes(value: Sequence[str]) -> tuple[str, ...]:
    return tuple(_names("setting_prefixes", value, f"a tuple of names: ({value!r},)"))


def _positive(value: Collection[str]) -> frozenset[str]:
    return frozenset(_names("positive_states", value, f"a set of names: {{{value!r}}}"))


def _scalars(value: Collection[str]) -> frozenset[str]:
    return frozenset(_names("scalar_states", value, f"a set of names: {{{value!r}}}"))


def _names(field_name: str, value: Collection[str], meant: str) -> Collection[str]:
    """Raise for a text where several names belong: it would be taken letter by letter."""
    if isinstance(value, str):
        raise PluginError(f"OptimizerEntry({field_name}={value!r}): must be {meant}")
    return value


def _declared(value: Mapping[str, StateKind] | DeclaredState) -> DeclaredState:
    return value if isinstance(value, DeclaredState) else DeclaredState(value)


def _one_granularity(value: Granularity | str) -> Granularity:
    try:
        return Granularity(value)
    except ValueError:
        allowed = " or ".join(repr(each.value) for each in Granularity)
        raise PluginError(f"OptimizerEntry(granularity={value!r}): must be {allowed}") from None


def _known_granularity(given: object) -> Granularity:
    """Return what `granularity_for` says, which is a stranger's code."""
    if isinstance(given, str) and given in tuple(Granularity):
        return Granularity(given)
    raise PluginError(
        f"granularity_for returned a {type(given).__name__}; it must return one of "
        f"{', '.join(map(repr, map(str, Granularity)))}"
    )


def _numel(spec: ParamSpec, view: MatrixView | None) -> float:
    return float(math.prod(spec.shape))


def _alignment(instance: object, attribute: object, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PluginError(f"OptimizerEntry(alignment={value!r}): must be a number of elements, at least 1")


def _dotted_class(instance: object, attribute: object, value: str | None) -> None:
    if value is not None and not (isinstance(value, str) and all(value.partition(":")[::2])):
        raise PluginError(f'OptimizerEntry(same_as={value!r}): must be "module:Class" of an optimizer')


def _of_its_type(instance: object, attribute: Attribute[Any], value: Any) -> None:
    wanted = type(attribute.default)
    if type(value) is not wanted:
        raise PluginError(
            f"OptimizerEntry({attribute.name}=...): is of type {type(value).__name__}; it must be a {wanted.__name__}"
        )


def _dtypes(instance: object, attribute: object, value: Mapping[str, Collection[torch.dtype]]) -> None:
    """Raise for a state with one dtype, or the name of one, where a set of them belongs."""
    for key, dtypes in value.items() if isinstance(value, Mapping) else ():
        if isinstance(dtypes, str | torch.dtype):
            raise PluginError(
                f"OptimizerEntry(state_dtypes={{{key!r}: {dtypes!r}}}): must be a set of dtypes: "
                f"{{{key!r}: frozenset({{torch.bfloat16, torch.float32}})}}"
            )


@frozen
class OptimizerEntry:
    """Everything that megaopt needs to know about an optimizer.

    Args:
        optimizer_cls: a `torch.optim.Optimizer` subclass, or `"module:Class"`, which is imported when an optimizer is
            built: listing entries imports no algorithm.
        init_state_fn: `(optimizer, config=None)`; makes the state of every parameter without a gradient and without
            moving a parameter. None: `state` declares it, or megaopt-bridge learns it where an optimizer is built.
        state: state key to what the state is, in place of `init_state_fn`: `"param"`, like the parameter; `"scalar"`, a
            tensor with one number; `"number"`, one of Python; or a shape. Zeros of that kind can be loaded into, and
            the first step makes the state. `{}`: there is none. None: it is learned, as above.
        config_to_kwargs: `(config, model_chunks, pg_collection)` to constructor arguments. None: every constructor
            parameter is looked up as `{prefix}_{name}` for each of `setting_prefixes`, then as a core field.
        default_param_overrides: overrides that are added whenever this is the run's optimizer.
        settings: an attrs class; its fields appear on `OptimizerConfig` as `{setting_prefixes[0]}_{field}`. A field's
            `metadata={"help": ...}` is the text that `megaopt describe` shows, with the values of
            `metadata={"choices": ...}` (strings, or a function that returns them) where there are any.
        setting_prefixes: prefixes of the settings that the constructor's arguments are read from.
        granularity: how finely the work may be cut over ranks.
        granularity_for: the configuration to the granularity, where settings change it. None: `granularity`.
        alignment: for granularity element, the cuts that a strategy makes fall on multiples of this many elements. More
            than 8 is a condition (blocks of quantized states); 8 gives the same bits on both sides of a cut.
        accepts: `(spec, view)` to None when the optimizer takes this parameter, else the reason why not, in words.
        fallback: the optimizer that steps what `accepts` refuses: a name, or a function of the configuration.
            None: a refused parameter is an error.
        fallback_override: the configuration to what parameters get that `accepts` refuses: an override, over which
            every other override wins key by key. None: nothing.
        step_cost: `(spec, view)` to the work of one step of the whole tensor, in elementary operations; strategies
            balance by it.
        split_step: makes the optimizer's step in three parts (:class:`~megaopt_core.sharding.SplitStep`):
            an adapter class or function of the inner optimizer, or `"module:name"` of one. None: it steps whole
            tensors only.
        refuses_split: the configuration to None when its step can be split, else why not in words. None: it always can.
        supports_peers: several ranks may step parts of one tensor together; its class finds their process group and
            the dimension that is cut in the `peers` of a tensor's `param_info`. State has an element for each element.
        refuses_peers: the configuration to None when peers can step it, else why not in words. None: they always can.
        state_dtypes: per state tensor the dtypes that it can be kept in (precision-aware states).
        state_dtype_settings: state key to the setting, of the core or of `settings`, that says in which of them; every
            key of `state_dtypes` needs one.
        positive_states: state keys whose values are never negative and are divided by, such as second moments: storing
            them in less never rounds a positive value to 0.
        scalar_states: state keys with one number for a parameter, which is no element of it even where the parameter
            has a single element too.
        honours_noop: where the optimizer has an attribute `found_inf`, a tensor of one element on its device that is
            1.0, a step changes neither parameters nor states, and no host reads it; torch's fused classes do so. On an
            accelerator the host then reads nothing before a step.
        supports_fp16: may step in a model that trains with fp16 mixed precision.
        mup: `(config, mup_width_mult)` to the overrides that muP asks for. None: hidden matrices get
            `lr / mup_width_mult`.
        agree: `(optimizer, process groups)`; called once on every rank when the inner optimizers are built, to settle
            what all of them must choose alike. It may communicate. None: there is nothing to settle.
        param_notes: the inner optimizer to what the report says of how it steps its parameters, by name; those of which
            there is nothing to say may be missing.
        unused_settings: `(config, specs)`, of the parameters that it steps, to the settings that were given and change
            nothing for them, each with the reason; a warning and the report name them. None: there are none.
        same_as: `"module:Class"` of an optimizer whose first steps this one honestly shares, as variants of Adam do;
            the report says it, and the kit does not take it for a silent stand-in.
        description: one line for `megaopt optimizers`.
        example: a line of Python for `megaopt describe`.

    Raises:
        PluginError: a key of `state_dtypes` has no setting, `state` has a kind that is none or stands beside
            `init_state_fn`, a text stands where several names belong, or the
            granularity or the alignment is none.

    Example:
        >>> import torch
        >>> entry = OptimizerEntry(torch.optim.SGD, setting_prefixes=("sgd",), description="plain SGD")
        >>> entry.load_class().__name__
        'SGD'
    """

    optimizer_cls: type[torch.optim.Optimizer] | str
    init_state_fn: InitState | None = None
    config_to_kwargs: ConfigToKwargs | None = None
    default_param_overrides: Mapping[ParamKey, ParamGroupOverride] = Factory(dict)
    settings: type | None = None
    setting_prefixes: tuple[str, ...] = field(default=(), converter=_prefixes)
    granularity: Granularity = field(default=Granularity.ELEMENT, converter=_one_granularity)
    granularity_for: GranularityRule | None = None
    alignment: int = field(default=DEFAULT_ALIGNMENT, validator=_alignment)
    accepts: Callable[[ParamSpec, MatrixView | None], str | None] | None = None
    fallback: str | Callable[[OptimizerConfig], str] | None = None
    fallback_override: Callable[[OptimizerConfig], ParamGroupOverride] | None = None
    step_cost: Callable[[ParamSpec, MatrixView | None], float] = _numel
    split_step: SplitStepFactory | str | None = None
    refuses_split: SplitRefusal | None = None
    supports_peers: bool = field(default=False, validator=_of_its_type)
    refuses_peers: SplitRefusal | None = None
    state_dtypes: Mapping[str, frozenset[torch.dtype]] = field(factory=dict, validator=_dtypes)
    state_dtype_settings: Mapping[str, str] = Factory(lambda: dict(_DTYPE_SETTINGS))
    positive_states: frozenset[str] = field(default=frozenset({"exp_avg_sq"}), converter=_positive)
    scalar_states: frozenset[str] = field(default=SCALAR_STATES, converter=_scalars)
    honours_noop: bool = field(default=False, validator=_of_its_type)
    supports_fp16: bool = field(default=False, validator=_of_its_type)
    mup: MupRule | None = None
    agree: Callable[[torch.optim.Optimizer, ProcessGroupCollection], None] | None = None
    param_notes: Callable[[torch.optim.Optimizer], Mapping[str, str]] | None = None
    unused_settings: Callable[[OptimizerConfig, Sequence[ParamSpec]], Mapping[str, str]] | None = None
    same_as: str | None = field(default=None, validator=_dotted_class)
    description: str = field(default="", validator=_of_its_type)
    example: str = field(default="", validator=_of_its_type)
    state: DeclaredState | None = field(default=None, converter=optional(_declared))

    def __attrs_post_init__(self) -> None:
        if self.state is not None and self.init_state_fn is not None:
            raise PluginError(
                "OptimizerEntry: give init_state_fn or state, not both: one of them makes the state"
            )
        unset = sorted(set(self.state_dtypes) - set(self.state_dtype_settings))
        if unset:
            raise PluginError(
                f"state_dtypes has {', '.join(map(repr, unset))}, but state_dtype_settings names no setting for it, "
                f"only for {', '.join(map(repr, sorted(self.state_dtype_settings))) or 'nothing'}"
            )

    def load_class(self) -> type[torch.optim.Optimizer]:
        """Return the optimizer class, importing it if it is named by a string.

        Raises:
            PluginError: the string names nothing, or something that is no `torch.optim.Optimizer`.
        """
        target = _imported(self.optimizer_cls, "optimizer_cls")
        if not (isinstance(target, type) and issubclass(target, torch.optim.Optimizer)):
            raise PluginError(f"optimizer_cls={self.optimizer_cls!r} is not a torch.optim.Optimizer subclass")
        return target

    def split_refusal(self, config: OptimizerConfig) -> str | None:
        """Return why the step cannot be split, None when it can; no algorithm is imported.

        Args:
            config: the run's configuration.

        Example:
            >>> from megaopt_core import OptimizerConfig
            >>> OptimizerEntry("torch.optim:SGD").split_refusal(OptimizerConfig(lr=0.1))
            'its entry offers no split step'
        """
        if self.split_step is None:
            return "its entry offers no split step"
        return None if self.refuses_split is None else self.refuses_split(config)

    def configured(self, config: OptimizerConfig) -> OptimizerEntry:
        """Return the entry as it is for one configuration: its granularity, whether it can be split and takes peers.

        Args:
            config: the run's configuration.
        """
        granularity = self.granularity
        if self.granularity_for is not None:
            granularity = _known_granularity(self.granularity_for(config))
        split_step = self.split_step if self.split_refusal(config) is None else None
        peers = self.supports_peers and (self.refuses_peers is None or self.refuses_peers(config) is None)
        if (granularity, split_step, peers) == (self.granularity, self.split_step, self.supports_peers):
            return self
        return evolve(self, granularity=granularity, split_step=split_step, supports_peers=peers)

    def load_split_step(self) -> SplitStepFactory | None:
        """Return what makes the step in three parts, importing it if it is named by a string; None: nothing does.

        Raises:
            PluginError: the string names nothing, or something that cannot be called.
        """
        if self.split_step is None:
            return None
        factory: SplitStepFactory = _imported(self.split_step, "split_step")
        if not callable(factory):
            raise PluginError(
                f"split_step={self.split_step!r} is no class or function of the inner optimizer"
            )
        return factory


def _imported(target: Any, name: str) -> Any:
    """Return what a string `"module:name"` names, and anything else as it is."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        with warnings.catch_warnings():  # filters that the module sets are its own affair
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(
            f"{name}={target!r} cannot be loaded ({type(error).__name__}: {error}); it must read 'module:Class'"
        ) from error
