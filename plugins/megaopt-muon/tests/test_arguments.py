"""What the constructors of Muon and adaptive Muon refuse, and groups that are added."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.settings import MuonSettings

from megaopt_core.errors import ConfigurationError

pytestmark = pytest.mark.any_python

CLASSES = [TensorParallelMuon, TensorParallelAdaptiveMuon]
NUMBERS = ("lr", "momentum", "weight_decay", "extra_scale_factor", "norm_eps")
SWITCHES = ("nesterov", "use_decoupled_weight_decay", "split_qkv", "cautious_weight_decay")
NO_NUMBERS = (None, True, "0.5", "", [], 1j, 10**400, float("nan"), float("inf"), torch.zeros(2))
NO_SWITCHES = (None, 0, 1.0, "yes", [], torch.tensor(True))
NO_ROWS = (5, "444", (4, 4), (4, 0, 4), (-4, 8, 4), (4.0, 4, 4), [(1, 2, 3)], (True, 4, 4), (4, 4, 10**400))

NO_TRIPLES = (
    5,
    0.5,
    "x",
    [1, 2, 3],
    [(1, 2)],
    [(1, 2, "c")],
    [(1, 2, 10**400)],
    [],
    ["123"],
    "123",
    [b"123"],
    [("1", "2", "3")],
    [(True, False, False)],
    {(1, 2, 3): 4},
    [{1, 2, 3}],
    [(1j, 2, 3)],
    torch.zeros(3),
    torch.zeros(1, 3, dtype=torch.bool),
)


def weight() -> torch.nn.Parameter:
    """Return a matrix."""
    return torch.nn.Parameter(torch.ones(12, 8))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in NUMBERS for value in NO_NUMBERS),
        *((name, 1e39) for name in ("lr", "weight_decay", "extra_scale_factor", "norm_eps")),
        ("norm_eps", 1e-50),
        *((name, value) for name in SWITCHES for value in NO_SWITCHES),
        *(("qkv_split_shapes", value) for value in NO_ROWS),
        *(("is_qkv_fn", value) for value in (True, "qkv", 3)),
        *(
            (name, value)
            for name in ("scale_mode", "split", "tp_mode", "ns_method")
            for value in ([], None, 3, "x")
        ),
        *(("fp32_matmul_prec", value) for value in ([], None, 3, "x")),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_wrong_argument_is_refused_when_it_is_given(
    kind: Callable[..., torch.optim.Optimizer], name: str, value: object
) -> None:
    """By its name, whatever its type."""
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        kind([weight()], **{name: value})


@pytest.mark.parametrize("name", ["beta2", "eps"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_a_wrong_number_of_the_second_moment_is_refused(name: str, value: object) -> None:
    """By its name, too."""
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        TensorParallelAdaptiveMuon([weight()], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("value", NO_TRIPLES, ids=str)
def test_wrong_coefficients_are_refused(kind: Callable[..., torch.optim.Optimizer], value: object) -> None:
    """They are triples of numbers."""
    with pytest.raises(ConfigurationError, match=r"^coefficients="):
        kind([weight()], coefficient_type="custom", coefficients=value)


@pytest.mark.parametrize("value", NO_TRIPLES, ids=str)
def test_wrong_coefficients_are_refused_as_a_setting(value: object) -> None:
    """By its name."""
    with pytest.raises(ConfigurationError, match=r"coefficients="):
        resolve_coefficients(
            "custom", 5, MuonSettings(coefficient_type="custom", coefficients=value).coefficients
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "value", [[[2, Fraction(-3, 2), 0.5]], torch.tensor([[2.0, -1.5, 0.5]])], ids=["list", "tensor"]
)
def test_triples_of_any_kind_are_taken(kind: Callable[..., torch.optim.Optimizer], value: Any) -> None:
    """A tensor, too."""
    setting = MuonSettings(coefficient_type="custom", coefficients=value)
    optimizer: Any = kind([weight()], coefficient_type="custom", coefficients=value)
    assert setting.coefficients == ((2.0, -1.5, 0.5),)
    assert optimizer.newton_schulz.coefficients == ((2.0, -1.5, 0.5),) * 5


@pytest.mark.parametrize("kind", CLASSES)
def test_numbers_of_other_types_are_taken(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Tensors of one element, and whole numbers that torch would not take."""
    param = weight()
    optimizer = kind([param], lr=torch.tensor(0.5), momentum=torch.tensor(0.5), norm_eps=10**30)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert bool(param.isfinite().all())
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cautious_weight_decay": True}, "cautious_weight_decay=True: .*use_decoupled_weight_decay=False"),
        ({"cautious_weight_decay": 1}, "cautious_weight_decay=1: must be True or False"),
        ({"lr": "0.5"}, "lr='0.5': must be a number of at least 0"),
        ({"momentum": 1.0}, "momentum=1.0: must be a number in"),
        ({"ns_plan": "x"}, "ns_plan='x'"),
        ({"nesterov": False}, "nesterov=False in a parameter group: .*constructor"),
        ({"scale_mode": "unit_rms_norm"}, "scale_mode='unit_rms_norm' in a parameter group"),
        ({"norm_eps": 1e-7}, "norm_eps=1e-07 in a parameter group"),
    ],
)
def test_a_group_that_is_added_is_checked(
    kind: Callable[..., torch.optim.Optimizer], settings: dict[str, Any], message: str
) -> None:
    """As the first ones are; a refused one is not there."""
    optimizer = kind([weight()], use_decoupled_weight_decay=False)
    with pytest.raises(ConfigurationError, match=message):
        optimizer.add_param_group({"params": [weight()], **settings})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [weight()], "lr": 0.5})
    assert optimizer.param_groups[1]["cautious_weight_decay"] is False


def test_a_group_of_the_first_ones_is_checked() -> None:
    """What it says for itself."""
    group = {"params": [weight()], "cautious_weight_decay": True}
    with pytest.raises(ConfigurationError, match="cautious_weight_decay=True"):
        TensorParallelMuon([group], use_decoupled_weight_decay=False)


TYPES = [
    lambda number: torch.tensor(number, dtype=torch.float64),
    lambda number: torch.tensor([number], dtype=torch.float64),
    lambda number: torch.nn.Parameter(torch.tensor(number)),
    Fraction,
]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("number", TYPES, ids=["tensor", "dimension", "parameter", "fraction"])
@pytest.mark.parametrize("where", ["constructor", "group", "added group"])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_numbers_of_other_types_are_the_same_numbers(
    kind: Callable[..., torch.optim.Optimizer],
    number: Callable[[float], Any],
    where: str,
    is_decoupled: bool,
) -> None:
    """Wherever they are given; only rates stay tensors."""

    def stepped(make: Callable[[float], Any]) -> torch.Tensor:
        param = torch.nn.Parameter(torch.ones(12, 8, dtype=torch.bfloat16))
        settings = {
            "lr": make(0.5),
            "weight_decay": make(0.25),
            "momentum": make(0.75),
            **({"beta2": make(0.5), "eps": make(0.125)} if kind is TensorParallelAdaptiveMuon else {}),
        }
        decay = {"use_decoupled_weight_decay": is_decoupled}
        if where == "constructor":
            optimizer = kind([param], **settings, **decay)
        elif where == "group":
            optimizer = kind([{"params": [param], **settings}], **decay)
        else:
            optimizer = kind([weight()], **decay)
            optimizer.add_param_group({"params": [param], **settings})
        for _ in range(2):
            param.grad = param.detach().cumsum(0).sin()
            optimizer.step()
        assert isinstance(optimizer.param_groups[-1]["momentum"], float)
        return param.detach()

    assert torch.equal(stepped(number), stepped(float))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_number_without_a_value_is_refused(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """A tensor on the meta device has none."""
    with pytest.raises(ConfigurationError, match=r"^lr="):
        kind([weight()], lr=torch.tensor(0.5, device="meta"))
