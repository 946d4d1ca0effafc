"""Newton-Schulz against the formula in float64."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from long_runs import sometimes
from megaopt_muon.choice.growth import largest_norm
from megaopt_muon.choice.schedule import are_measured, longest_blocks, plan_blocks
from megaopt_muon.choice.spectrum import Spectrum, spectrum_of
from megaopt_muon.coefficients import get_supported_coefficient_types, resolve_coefficients
from megaopt_muon.newton_schulz import iteration
from megaopt_muon.newton_schulz.iteration import NewtonSchulz

pytestmark = pytest.mark.any_python

SPECTRA = [
    "flat", "linear", "geometric:0.3", "geometric:1", "geometric:2", "geometric:4", "geometric:6", "power:0.5",
    "power:1", "power:2", "rank:1", "half", "two", "spike:3", "spike:10", "spike:40", "huge", "tiny",
]  # fmt: skip
SHAPES = [(96, 96), (64, 256), (192, 48)]
LARGE = [(256, 512), (528, 264), (300, 600), (640, 384), (320, 480), (460, 340)]
"""Of these sizes matrices of 16 bits may go in runs. Nearly equal numbers round all the same way, up or down by their
size: what is compared is the root mean square over sizes."""

TYPES = [name for name in get_supported_coefficient_types() if name != "custom"]
DRAWS = 4
"""Sets of singular vectors that a small matrix's error is the root mean square over: one leaves rounding to luck."""

MODES = {
    "highest": ("highest", None, torch.float32, 1.2),
    "medium in bfloat16": ("medium", "in_bfloat16", torch.bfloat16, 2.0),
    "medium in float32": ("medium", "in_float32", torch.bfloat16, 0.5),
}
"""Precision, fixture, dtype of the plain iteration, and the part of its error that is allowed."""


@pytest.mark.parametrize(
    ("coefficient_type", "mode"),
    sometimes(
        itertools.product(TYPES, MODES),
        always=[
            (name, mode)
            for name, mode in itertools.product(TYPES, MODES)
            if mode != "medium in bfloat16" or name in {"quintic", "cans"}
        ],
    ),
)
def test_auto_is_as_accurate_as_the_plain_iteration(request, formulas, coefficient_type, mode):
    """On every spectrum, auto's error is within 1.2 times the plain iteration's in float32, and twice in bfloat16."""
    # Where float32 stands in for bfloat16, it is within half of the plain iteration's in bfloat16.
    precision, fixture, dtype, limit = MODES[mode]
    if fixture is not None:
        request.getfixturevalue(fixture)

    coefficients = resolve_coefficients(coefficient_type, 5)
    methods = ["auto", "gram"] if precision == "medium" else ["auto"]
    worst = []
    for (rows, columns), kind in itertools.product(SHAPES, SPECTRA):
        drawn = [(kind, rows, columns, seed, coefficients) for seed in range(DRAWS)]
        plain = math.hypot(*(formulas.plain_error(*one, dtype) for one in drawn))
        for method in methods:
            iterate = NewtonSchulz(coefficients, precision, method)
            examples = [formulas.example(*one) for one in drawn]
            got = math.hypot(*(formulas.error(iterate(update), exact) for update, exact in examples))
            worst.append((got / plain, method, kind, rows, columns))
    assert max(worst)[0] <= limit, sorted(worst)[-3:]


@pytest.mark.parametrize("coefficient_type", ["simple", "quintic", "aol", "polar_express"])
@pytest.mark.parametrize(
    "kind", ["flat", "linear", "geometric:1", "geometric:4", "power:1", "spike:3", "spike:40"]
)
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="megaopt computes in float32 where oneDNN knows no bfloat16: a product takes a second there",
)
@pytest.mark.usefixtures("in_bfloat16")
def test_whole_products_are_as_accurate_as_the_plain_iteration(formulas, coefficient_type, kind):
    """In 16 bits on a processor, step by step and in runs, the error stays within twice the plain iteration's."""
    coefficients = resolve_coefficients(coefficient_type, 5)
    squares = dict.fromkeys(("plain", "standard", "gram"), 0.0)
    for rows, columns in LARGE:
        update = formulas.with_singular_values(formulas.spectrum(kind, min(rows, columns)), rows, columns)
        exact = formulas.newton_schulz64(update, coefficients)
        results = {
            "plain": formulas.newton_schulz_plain(update, coefficients, torch.bfloat16),
            "standard": NewtonSchulz(coefficients, "medium", "standard")(update),
            "gram": NewtonSchulz(coefficients, "medium", "gram")(update),
        }
        for name, result in results.items():
            squares[name] += formulas.error(result, exact) ** 2
    assert squares["standard"] <= 4.0 * squares["plain"]
    assert squares["gram"] <= 4.0 * squares["plain"]


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("shape", [(7, 1), (1, 7), (1, 1), (3, 16, 40), (300, 280)])
@pytest.mark.usefixtures("in_bfloat16")
def test_finite_momentum_gives_a_finite_update(coefficient_type, shape, precision):
    """Also nearly of rank 1, and where the coefficients drive the largest singular value away."""
    ns = NewtonSchulz(resolve_coefficients(coefficient_type, 8), precision)
    generator = torch.Generator().manual_seed(1)
    for noise in (0.0, 1e-3):
        left = torch.randn(*shape[:-1], 1, generator=generator)
        right = torch.randn(*shape[:-2], 1, shape[-1], generator=generator)
        update = left @ right + noise * torch.randn(shape, generator=generator)
        result = ns(update)
        assert result.isfinite().all()
        cosine = torch.cosine_similarity(result.flatten(-2), update.flatten(-2), dim=-1)
        assert cosine.min() > 0.0


@pytest.mark.parametrize("shape", [(40, 8, 8), (40, 32, 16), (20, 64, 64)])
@pytest.mark.parametrize("steps", [5, 6, 7, 8])
@pytest.mark.usefixtures("in_bfloat16")
def test_what_is_finite_but_blown_up_is_iterated_again(formulas, monkeypatch, steps, shape):
    """A norm that no matrix can have by these coefficients is noticed, and each other matrix keeps its bits."""
    coefficients = resolve_coefficients("cans", steps)
    updates = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    updates[0] = updates[0, :, :1] @ updates[0, :1]  # of rank 1
    ns = NewtonSchulz(coefficients, "medium")
    result = ns(updates)
    with monkeypatch.context() as patch:
        patch.setattr(iteration, "are_tame", lambda _: True)
        raw = ns(updates)
    most = torch.tensor(largest_norm(coefficients, *shape[1:]))
    assert (torch.linalg.matrix_norm(result) <= most).all()
    blown = ~(torch.linalg.matrix_norm(raw) <= most)
    assert 0 < blown.sum() < len(blown) / 2
    assert torch.equal(result[~blown], raw[~blown])
    exact = formulas.newton_schulz64(updates, coefficients)
    assert formulas.error(result[blown], exact[blown]) < 1e-2
    for update, matrix in zip(updates, result, strict=True):
        assert torch.equal(ns(update.expand(1, *shape[1:]))[0], matrix)


@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("fixture", ["in_bfloat16", "in_float32"])
def test_nothing_healthy_is_iterated_again(request, formulas, monkeypatch, fixture, coefficient_type):
    """With any spectrum, a result that is near the formula is within the norm that the coefficients allow."""
    request.getfixturevalue(fixture)
    monkeypatch.setattr(iteration, "are_tame", lambda _: True)
    for steps, (rows, columns), kind in itertools.product((1, 5, 8), SHAPES, SPECTRA):
        coefficients = resolve_coefficients(coefficient_type, steps)
        update = formulas.with_singular_values(formulas.spectrum(kind, min(rows, columns)), rows, columns)
        result = NewtonSchulz(coefficients, "medium")(update)
        if formulas.error(result, formulas.newton_schulz64(update, coefficients)) < 0.2:
            # The margin is a tenth, of which rounding takes less than a hundredth.
            assert result.norm() <= largest_norm(coefficients, rows, columns) / 1.09, kind


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("triple", [(8.4703, -25.1081, 18.6293), (1e10, -1e10, 1e10)])
@pytest.mark.usefixtures("in_float32")
def test_coefficients_that_diverge_give_a_finite_update(method, triple):
    """Also where several steps are made on a Gram matrix, whose multiple of the identity leaves float32."""
    for precision in ("medium", "highest"):
        for update in (torch.eye(256), torch.eye(300, 400, dtype=torch.bfloat16)):
            assert NewtonSchulz((triple,) * 10, precision, method)(update).isfinite().all()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory holds NaN wherever torch leaves it as it finds it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


ZERO_OR_NOT = [
    triple for triple in itertools.product((0.0, 1.5), (0.0, -0.5), (0.0, 1e-3)) if not all(triple)
]
"""Triples of which some coefficient is zero."""


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("triple", ZERO_OR_NOT)
@pytest.mark.usefixtures("poisoned")
def test_coefficients_of_zero_are_the_formula(request, formulas, triple, mode, method):
    """Also where both factors of a product are zero, of batches and of matrices that go alone."""
    precision, fixture, *_ = MODES[mode]
    if fixture is not None:
        request.getfixturevalue(fixture)
    for shape in ((8, 8), (2, 64, 100), (3000, 1), (270, 600), (600, 600)):
        update = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        for steps in ((triple,) * 5, (triple, (1.875, -1.25, 0.375))):
            exact = formulas.newton_schulz64(update, steps)
            result = NewtonSchulz(steps, precision, method)(update)
            assert (result - exact).norm() <= 0.03 * exact.norm().clamp_min(1e-30), (shape, steps)


@pytest.mark.parametrize(("method", "shape"), [("standard", (620, 600)), ("gram", (260, 600))])
@pytest.mark.parametrize("square", [1e-2, 1e-4, 1e-6, 1e-30])
@pytest.mark.usefixtures("in_bfloat16")
def test_a_small_coefficient_is_as_accurate(formulas, square, method, shape):
    """A step whose `c` is small beside its `b` is made of no square, on whose diagonal 16 bits would keep nothing."""
    coefficients = ((1.5, -0.5, square),) * 5
    update = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    exact = formulas.newton_schulz64(update, coefficients)
    plain = formulas.error(formulas.newton_schulz_plain(update, coefficients, torch.bfloat16), exact)
    got = formulas.error(NewtonSchulz(coefficients, "medium", method)(update), exact)
    assert got <= 2.0 * plain


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 10])
@pytest.mark.parametrize("coefficient_type", ["simple", "quintic", "polar_express", "aol", "deepseekv4"])
@pytest.mark.parametrize(("fixture", "limit"), [("in_bfloat16", 2.0), ("in_float32", 0.5)])
def test_other_numbers_of_steps_are_as_accurate(request, formulas, coefficient_type, steps, fixture, limit):
    """The blocks are right for any number of steps, in bfloat16 and where float32 stands in for it."""
    request.getfixturevalue(fixture)
    coefficients = resolve_coefficients(coefficient_type, steps)
    ns = NewtonSchulz(coefficients, "medium", "gram")
    for kind in ("flat", "geometric:2", "power:1", "spike:10"):
        update = formulas.with_singular_values(formulas.spectrum(kind, 64), 64, 256)
        exact = formulas.newton_schulz64(update, coefficients)
        plain = formulas.error(formulas.newton_schulz_plain(update, coefficients, torch.bfloat16), exact)
        assert formulas.error(ns(update), exact) <= limit * plain, kind


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize(
    "shape", [(8, 8), (8, 24), (24, 8), (1, 5), (5, 1), (3, 8, 24), (3, 24, 8), (230, 480), (480, 230)]
)
def test_every_method_is_the_same_function(formulas, shape, method):
    """In float64 all methods give the formula, batched or not."""
    coefficients = resolve_coefficients("quintic", 5)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = NewtonSchulz(coefficients, "highest", method)(update)
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, formulas.newton_schulz64(update, coefficients), rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (300, 500)])
def test_zero_gives_zero(request, mode, shape):
    """A matrix of zeros has no direction: its update is zero."""
    precision, fixture, *_ = MODES[mode]
    if fixture is not None:
        request.getfixturevalue(fixture)
    result = NewtonSchulz(resolve_coefficients("quintic", 5), precision)(torch.zeros(shape))
    assert result.count_nonzero() == 0


@pytest.mark.parametrize("fixture", ["in_bfloat16", "in_float32"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_stays_in_its_matrix(request, bad, fixture):
    """A matrix with a bad number leaves the others of its batch alone, bit for bit."""
    request.getfixturevalue(fixture)
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), "medium")
    batch = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(2))
    clean = ns(batch)
    batch[1, 0, 0] = bad
    result = ns(batch)
    assert result[1].isnan().any()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-4, 1e4, 1e30])
def test_norm_may_leave_the_range_of_squares(formulas, scale):
    """Matrices whose squares overflow or vanish in float32 follow the formula, including its floor of 1e-15."""
    coefficients = resolve_coefficients("quintic", 5)
    update = scale * torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
    exact = formulas.newton_schulz64(update, coefficients)
    for result in (
        NewtonSchulz(coefficients, "highest")(update),
        NewtonSchulz(coefficients, "highest")(update.expand(2, 12, 20))[1],
    ):
        assert formulas.error(result, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (300, 260), (3, 16, 40)])
def test_a_narrow_update_is_divided_in_float32(formulas, dtype, shape):
    """What float32 is asked for iterates on the numbers that came, not on quotients of 16 bits."""
    coefficients = resolve_coefficients("quintic", 5)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    exact = formulas.newton_schulz64(update, coefficients)
    assert formulas.error(NewtonSchulz(coefficients, "highest")(update), exact) < 1e-5


def test_input_is_not_changed():
    """The update that is passed in stays as it is."""
    update = torch.randn(8, 12)
    before = update.clone()
    NewtonSchulz(resolve_coefficients("quintic", 5), "highest")(update)
    assert torch.equal(before, update)


def test_high_sets_and_restores_the_matmul_precision():
    """Precision high uses TF32 where there is, inside the call only."""
    before = torch.get_float32_matmul_precision()
    NewtonSchulz(resolve_coefficients("quintic", 5), "high")(torch.randn(8, 12))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("steps", range(1, 13))
@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("spectrum", list(Spectrum))
def test_blocks_cover_every_step(coefficient_type, steps, spectrum):
    """The lengths of the blocks add up to the number of steps."""
    coefficients = resolve_coefficients(coefficient_type, steps)
    for dtype in (torch.float32, torch.bfloat16):
        assert sum(longest_blocks(coefficients, dtype, spectrum)) == steps


LEAST = 1.0 / 12.0


def bounded(kind: str, size: int) -> torch.Tensor:
    """Return singular values whose squares lie above a twelfth of their mean, most of them just above."""
    squares = torch.ones(size, dtype=torch.float64)
    match kind:
        case "linear":
            squares = torch.linspace(1.2 * LEAST, 1.9, size, dtype=torch.float64)
        case "one small":
            squares[0] = 1.1 * LEAST
        case "a third small":
            squares[: size // 3] = 0.75 * LEAST  # of the mean, which is lower, 1.1
        case "one large":
            squares[0], squares[1:9] = 6.0, 1.2 * LEAST
    return squares.sqrt()


@pytest.mark.parametrize("kind", ["flat", "linear", "one small", "a third small", "one large"])
@pytest.mark.parametrize("steps", [5, 8, 10])
def test_bounded_spectra_take_five_steps_together(formulas, kind, steps):
    """Where no singular value is small, the longest blocks are as accurate in float32, with every coefficient set."""
    _, _, dtype, limit = MODES["highest"]
    update = formulas.with_singular_values(bounded(kind, 260), 260, 600)
    x = update / update.norm()
    assert spectrum_of(x @ x.mT) is Spectrum.BOUNDED
    assert spectrum_of((x @ x.mT).bfloat16()) is Spectrum.EVEN
    for coefficient_type in TYPES:
        coefficients = resolve_coefficients(coefficient_type, steps)
        plan = plan_blocks("auto", coefficients, 260, 600, x.device, dtype, Spectrum.BOUNDED)
        assert plan == ((5,) if steps == 5 else (5, steps - 5))
        exact = formulas.newton_schulz64(update, coefficients)
        plain = formulas.error(formulas.newton_schulz_plain(update, coefficients, dtype), exact)
        got = formulas.error(NewtonSchulz(coefficients, "highest", "auto")(update), exact)
        assert got <= limit * plain, (coefficient_type, got, plain)


@pytest.mark.parametrize("least", [0.0, 1e-12, 1e-3, 0.9 * LEAST])
def test_a_single_small_singular_value_is_noticed(formulas, least):
    """The Frobenius norm does not tell a spectrum with one small value from one without; the bound does."""
    values = torch.ones(300, dtype=torch.float64)
    values[7] = least**0.5
    update = formulas.with_singular_values(values, 300, 700)
    x = update / update.double().norm()
    assert spectrum_of((x @ x.mT).float()) is Spectrum.EVEN


def test_a_gradient_that_is_not_finite_is_not_bounded():
    """NaN and infinity prove nothing."""
    for value in (torch.nan, torch.inf):
        gram = torch.eye(256) / 256
        gram[3, 3] = value
        assert spectrum_of(gram) is Spectrum.UNKNOWN


def test_float32_that_stands_in_for_bfloat16_takes_five_steps_together():
    """Whatever the spectrum, up to coefficients as steep as were measured; square matrices are cheaper step by step."""
    rest = (torch.device("cpu"), torch.float32, Spectrum.UNKNOWN)
    coefficients = resolve_coefficients("polar_express", 8)
    for method in ("auto", "gram"):
        assert plan_blocks(method, coefficients, 64, 256, *rest, relaxed=True) == (5, 3)
    assert plan_blocks("standard", coefficients, 64, 256, *rest, relaxed=True) == (1,) * 8
    assert plan_blocks("auto", coefficients, 256, 256, *rest, relaxed=True) == (1,) * 8
    assert all(are_measured(resolve_coefficients(name, 8)) for name in TYPES)
    for steeper in ((8.6, -22.9, 16.5), (8.2, -25.3, 16.5), (8.2, -22.9, 18.8)):
        assert not are_measured((coefficients[1], steeper))


@pytest.mark.usefixtures("in_float32")
def test_coefficients_that_were_not_measured_take_single_steps(formulas):
    """Under medium, too, steep coefficients of one's own iterate as under highest."""
    update = formulas.with_singular_values(formulas.spectrum("geometric:2", 64), 64, 256)
    (a, b, c), *rest = resolve_coefficients("cans", 5)
    for coefficients, same in ((((1.01 * a, b, c), *rest), True), (((a, b, c), *rest), False)):
        medium, highest = (
            NewtonSchulz(coefficients, precision)(update) for precision in ("medium", "highest")
        )
        assert medium.isfinite().all()
        assert torch.equal(medium, highest) is same


def test_auto_takes_the_cheaper_by_shape():
    """Square matrices take single steps, long ones take blocks."""
    coefficients = resolve_coefficients("quintic", 5)
    rest = (torch.device("cpu"), torch.bfloat16, Spectrum.SPREAD)
    assert plan_blocks("auto", coefficients, 768, 768, *rest) == (1, 1, 1, 1, 1)
    assert plan_blocks("auto", coefficients, 768, 3072, *rest) == (3, 2)
    assert plan_blocks("auto", coefficients, 768, 3072, *rest[:2], Spectrum.UNKNOWN) == (2, 1, 2)
    assert plan_blocks("standard", coefficients, 768, 3072, *rest) == (1, 1, 1, 1, 1)
    assert plan_blocks("gram", coefficients, 768, 768, *rest) == (3, 2)
