"""What module types say, and what users and plugins say."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.errors import RoutingError, ViewError
from megaopt_core.params import MatrixView, Role
from megaopt_core.params._roles import Doubt
from megaopt_core.routing import infer_roles, register_matrix_view

PLAIN = MatrixView()


def inside(layer: nn.Module, width: int = 8) -> nn.Sequential:
    """Return a model with a layer in its middle, where it is neither first nor last."""
    return nn.Sequential(layer, nn.LayerNorm(width), nn.Linear(width, 4))


def seen(layer: nn.Module, name: str = "weight") -> Role | MatrixView | None:
    """Return what a layer's parameter is seen as: its role, or its view when it is a matrix."""
    decision = infer_roles(inside(layer))[f"0.{name}"]
    assert not decision.uncertain
    return decision.view if decision.role is Role.MATRIX else decision.role


class Table(nn.Embedding):
    """A subclass keeps the meaning of its class."""


class Conv1D(nn.Module):
    """The layer of the same name of transformers: stores [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class ColumnParallel(nn.Module):
    """A linear layer by structure, which returns its bias apart."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, self.weight), self.bias


def gates(count: int, size: int) -> MatrixView:
    """Return the view of a weight of several gates."""
    return MatrixView(split_sizes=(size,) * count)


@pytest.mark.parametrize(
    ("layer", "name", "expected"),
    [
        (lambda: nn.Embedding(9, 4), "weight", Role.EMBEDDING),
        (lambda: nn.EmbeddingBag(9, 4), "weight", Role.EMBEDDING),
        (lambda: Table(9, 4), "weight", Role.EMBEDDING),
        (lambda: nn.Linear(4, 8), "weight", PLAIN),
        (lambda: nn.Linear(4, 8), "bias", Role.ELEMENTWISE),
        (lambda: Conv1D(8, 4), "weight", MatrixView(transposed=True)),
        (lambda: ColumnParallel(4, 8), "weight", PLAIN),
        (lambda: nn.LayerNorm((3, 8)), "weight", Role.ELEMENTWISE),
        (lambda: nn.BatchNorm2d(8), "weight", Role.ELEMENTWISE),
        (lambda: nn.GroupNorm(2, 8), "weight", Role.ELEMENTWISE),
        (lambda: nn.RMSNorm((2, 8)), "weight", Role.ELEMENTWISE),
        (lambda: nn.PReLU(8), "weight", Role.ELEMENTWISE),
        (lambda: nn.Conv2d(4, 8, 3), "weight", PLAIN),
        (lambda: nn.Conv2d(8, 8, 3, groups=8), "weight", Role.ELEMENTWISE),
        (lambda: nn.Conv1d(8, 16, 3, groups=8), "weight", Role.ELEMENTWISE),
        (lambda: nn.Conv2d(4, 8, 3, groups=2), "weight", gates(2, 4)),
        (lambda: nn.ConvTranspose2d(4, 8, 2), "weight", MatrixView(transposed=True)),
        (lambda: nn.ConvTranspose2d(8, 8, 2, groups=8), "weight", Role.ELEMENTWISE),
        (
            lambda: nn.ConvTranspose2d(4, 8, 2, groups=2),
            "weight",
            MatrixView(transposed=True, split_dim=1, split_sizes=(2, 2)),
        ),
        (lambda: nn.Bilinear(4, 5, 8), "weight", PLAIN),
        (lambda: nn.LSTM(4, 8), "weight_ih_l0", gates(4, 8)),
        (lambda: nn.LSTM(4, 8, bidirectional=True), "weight_hh_l0_reverse", gates(4, 8)),
        (lambda: nn.LSTM(4, 8, proj_size=5), "weight_hr_l0", PLAIN),
        (lambda: nn.GRU(4, 8), "weight_hh_l0", gates(3, 8)),
        (lambda: nn.RNN(4, 8), "weight_ih_l0", PLAIN),
        (lambda: nn.LSTMCell(4, 8), "weight_ih", gates(4, 8)),
        (lambda: nn.GRUCell(4, 8), "weight_hh", gates(3, 8)),
        (lambda: nn.RNNCell(4, 8), "weight_hh", PLAIN),
        (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", gates(3, 8)),
        (lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4), "k_proj_weight", PLAIN),
        (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "bias_k", Role.ELEMENTWISE),
        (lambda: nn.MultiheadAttention(8, 2), "out_proj.weight", PLAIN),
    ],
)
def test_module_types(layer, name, expected):
    """Known modules say what their parameters are."""
    assert seen(layer(), name) == expected


def test_complex_numbers():
    """Complex weights are element-wise, in whatever module."""
    assert seen(nn.Linear(4, 8, dtype=torch.complex64)) is Role.ELEMENTWISE


@pytest.mark.parametrize("parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm(parametrize):
    """The direction is the matrix, the gain is element-wise, in the new style and in the old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = parametrize(nn.Linear(4, 8, bias=False))
    roles = {decision.role for name, decision in infer_roles(inside(layer)).items() if name.startswith("0.")}
    assert roles == {Role.MATRIX, Role.ELEMENTWISE}
    gain = next(
        decision
        for name, decision in infer_roles(inside(layer)).items()
        if name.endswith(("original0", "_g"))
    )
    assert gain.role is Role.ELEMENTWISE


def test_spectral_norm():
    """A spectrally normalized weight stays the matrix that it is."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
    assert seen(layer, "parametrizations.weight.original") == PLAIN


def test_annotations():
    """A plugin's annotation wins over what the rules find."""
    roles = infer_roles(inside(nn.Linear(4, 8)), {"0.weight": Role.ELEMENTWISE, "2.weight": MatrixView()})
    assert roles["0.weight"].role is Role.ELEMENTWISE
    assert roles["2.weight"].view == PLAIN
    assert "plugin" in roles["0.weight"].reason


def test_annotation_of_a_tied_name():
    """An annotation may use any of the names of a tied parameter."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    assert infer_roles(model, {"1.weight": Role.OUTPUT})["0.weight"].role is Role.OUTPUT


def test_annotation_without_a_parameter():
    """An annotation for nothing is an error that names it."""
    with pytest.raises(RoutingError) as caught:
        infer_roles(nn.Linear(2, 2), {"wieght": Role.MATRIX})
    assert (
        str(caught.value)
        == "infer_roles: annotations name parameters that the model does not have: ['wieght']"
    )


def test_attributes_win():
    """An attribute on the parameter wins over annotations, registered views and rules."""
    model = inside(nn.Linear(4, 8))
    model[0].weight.matrix_view = MatrixView(split_sizes=(4, 4))
    model[2].weight.is_embedding_or_output_parameter = False
    with register_matrix_view(nn.Linear, MatrixView(split_sizes=(1,))):
        roles = infer_roles(model, {"0.weight": Role.ELEMENTWISE})
    assert roles["0.weight"].view == MatrixView(split_sizes=(4, 4))
    assert roles["2.weight"].role is Role.MATRIX


def test_use_muon():
    """`use_muon` False makes a matrix element-wise and leaves an embedding what it is; True makes a matrix."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    model[0].weight.use_muon = model[1].weight.use_muon = False
    model[3].weight.use_muon = model[2].weight.use_muon = True
    roles = infer_roles(model)
    assert roles["0.weight"].role is Role.EMBEDDING
    assert roles["1.weight"].role is Role.ELEMENTWISE
    assert roles["2.weight"].role is Role.ELEMENTWISE  # one dimension is no matrix, whoever says so
    assert roles["3.weight"].role is Role.MATRIX


def test_is_qkv():
    """The attributes of a fused q, k and v give its view."""
    model = inside(nn.Linear(4, 8))
    model[0].weight.is_qkv = True
    model[0].weight.qkv_split_shapes = [2, 1, 1]
    assert infer_roles(model)["0.weight"].view == MatrixView(split_sizes=(2, 1, 1))


def test_output_attribute():
    """`is_embedding_or_output_parameter` marks a hidden layer as output, an embedding as what it is."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    for layer in (model[0], model[1]):
        layer.weight.is_embedding_or_output_parameter = True
    roles = infer_roles(model)
    assert (roles["0.weight"].role, roles["1.weight"].role) == (Role.EMBEDDING, Role.OUTPUT)


def test_registered_views():
    """A registered view applies to subclasses and by predicate, and ends when its handle is removed."""
    model = inside(Conv1D(8, 4))
    handle = register_matrix_view(
        lambda module: getattr(module, "nf", 0) == 8, lambda module: MatrixView(0, True, 0, (4, 4))
    )
    try:
        assert infer_roles(model)["0.weight"].view == MatrixView(0, True, 0, (4, 4))
    finally:
        handle.remove()
        handle.remove()
    assert infer_roles(model)["0.weight"].view == MatrixView(transposed=True)


CONTRADICTIONS = {
    "attributes": (
        {"matrix_view": MatrixView(split_sizes=(4, 4)), "is_qkv": True, "qkv_split_shapes": (2, 1, 1)},
        {},
        "0.weight: two descriptions contradict each other: attribute matrix_view says MatrixView(split rows (4, 4)), "
        "attributes is_qkv and qkv_split_shapes says MatrixView(qkv: split rows (2, 1, 1))",
    ),
    "muon and output": (
        {"use_muon": True, "is_embedding_or_output_parameter": True},
        {},
        "0.weight: two descriptions contradict each other: attribute use_muon says role 'matrix', attribute "
        "is_embedding_or_output_parameter says an embedding or output",
    ),
    "annotation and registration": (
        {},
        {"0.weight": MatrixView(split_sizes=(4, 4))},
        "0.weight: two descriptions contradict each other: a plugin's annotation of '0.weight' says "
        "MatrixView(split rows (4, 4)), register_matrix_view(Linear, param='weight') says "
        "MatrixView(split rows (1, 1))",
    ),
    "not a view": (
        {"matrix_view": 3},
        {},
        "0.weight: attribute matrix_view must be a MatrixView or a Role, got 3",
    ),
    "does not fit": (
        {"matrix_view": MatrixView(split_sizes=(3, 2))},
        {},
        "0.weight: attribute matrix_view: MatrixView(split rows (3, 2)): the sizes add up to 5, which does not divide "
        "the 8 rows of a parameter of shape (8, 4)",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions(case):
    """Two descriptions that contradict each other are an error that names the parameter and both."""
    attributes, annotations, message = CONTRADICTIONS[case]
    model = inside(nn.Linear(4, 8))
    for name, value in attributes.items():
        setattr(model[0].weight, name, value)
    with register_matrix_view(nn.Linear, MatrixView(split_sizes=(1, 1))) as handle:
        if not annotations:
            handle.remove()
        with pytest.raises(ViewError) as caught:
            infer_roles(model, annotations)
    assert str(caught.value) == message


def test_two_registrations_contradict():
    """Two registered views of one parameter are an error, two equal ones are not."""
    model = inside(nn.Linear(4, 8))
    first, second = MatrixView(split_sizes=(1, 1)), MatrixView(split_sizes=(2, 2))
    with register_matrix_view(nn.Linear, first), register_matrix_view(nn.Linear, first):
        assert infer_roles(model)["0.weight"].view == first
    with (
        register_matrix_view(nn.Linear, first),
        register_matrix_view(nn.Linear, second),
        pytest.raises(ViewError, match=r"0\.weight: two registrations describe it"),
    ):
        infer_roles(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, PLAIN), "register_matrix_view: match must be a module class or a predicate, got 3"),
        ((nn.Linear, 3), "register_matrix_view: view must be a MatrixView or a function of a module, got 3"),
    ],
)
def test_bad_registrations(arguments, message):
    """A registration of something else is refused at once."""
    with pytest.raises(ViewError) as caught:
        register_matrix_view(*arguments)
    assert str(caught.value) == message


def test_lazy_modules():
    """A parameter without a shape cannot be routed, and the error says what to do."""
    with pytest.raises(RoutingError, match=r"0\.weight is not initialized yet; run one forward before"):
        infer_roles(nn.Sequential(nn.LazyLinear(4)))


def test_no_source():
    """Without a source nothing is known for sure: a bare matrix is a guess, and says so."""
    scope = {"nn": nn, "torch": torch}
    exec(  # noqa: S102 - the point is a class without a source
        "class Hidden(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = nn.Parameter(torch.zeros(8, 4))\n"
        "    def forward(self, x):\n"
        "        return x @ self.w.T\n",
        scope,
    )
    decision = infer_roles(inside(scope["Hidden"]()))["0.w"]
    assert decision.role is Role.MATRIX
    assert decision.uncertain


class OddSplit(nn.Module):
    """Uses two overlapping parts of a projection: no view describes that."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return torch.tanh(y[..., :8]) * y[..., 4:]


def test_unknown_layouts_stay_whole():
    """A layout that no view describes leaves the matrix whole, and uncertain."""
    decision = infer_roles(inside(OddSplit()))["0.proj.weight"]
    assert decision.view == PLAIN
    assert decision.uncertain
    assert decision.reason == (
        "weight of Linear; its parts are used in a way that no view describes; its attribute matrix_view settles this"
    )
    assert decision.doubt is Doubt.LAYOUT


def test_wrappers_change_nothing():
    """Compiled, checkpointed and wrapped models have the same roles."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def build():
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))

    expected = infer_roles(build())
    layered = build()
    layered[1] = checkpoint_wrapper(layered[1])
    for model in (layered, torch.compile(build()), nn.DataParallel(build()), checkpoint_wrapper(build())):
        assert infer_roles(model) == expected


def test_frozen_parameters_have_roles():
    """Freezing changes no role."""
    assert (
        infer_roles(inside(nn.Linear(4, 8)).requires_grad_(requires_grad=False))["0.weight"].role
        is Role.MATRIX
    )


def test_nothing_is_changed():
    """Inferring roles leaves modules and parameters as they were."""
    model = inside(nn.LSTM(4, 8))
    before = [dict(vars(module)) for module in model.modules()], [dict(vars(p)) for p in model.parameters()]
    infer_roles(model)
    assert (
        [dict(vars(module)) for module in model.modules()],
        [dict(vars(p)) for p in model.parameters()],
    ) == before


def test_inside_a_device_context():
    """A default device changes nothing about the rules."""
    with torch.device("meta"):
        assert infer_roles(inside(nn.Linear(4, 8)))["0.weight"].view == PLAIN


class ByHand(nn.Module):
    """Uses the weight of its child without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(input=x, weight=self.qkv.weight).chunk(3, dim=-1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_a_childs_weight_used_by_hand():
    """A fused layer is fused, too, when its weight is used without calling it."""
    decision = infer_roles(inside(ByHand(), 4))["0.qkv.weight"]
    assert decision.view == MatrixView(split_sizes=(4, 4, 4))
