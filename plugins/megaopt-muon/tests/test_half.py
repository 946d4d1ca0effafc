"""Newton-Schulz in float16, and the step of an accelerator: its numbers on a CPU, its calls on none."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_muon.choice.half_runs import half_runs
from megaopt_muon.choice.methods import MethodBook
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz import iteration
from megaopt_muon.newton_schulz.half import half_scale, iterate_half
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.pieces import execution
from megaopt_muon.pieces.batches import batch_key
from megaopt_muon.products import hopper
from megaopt_muon.products.symmetric import whole_symmetric
from megaopt_muon.step.changes import Change, applied_together
from megaopt_muon.step.elementwise import Decay
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.any_python

SIMPLE = resolve_coefficients("simple", 5)
SPECTRA = [
    "flat",
    "linear",
    "geometric:2",
    "power:0.75",
    "power:2",
    "rank:1",
    "half",
    "spike:10",
    "huge",
    "tiny",
]


ROUNDING = 2.0**-11
"""Of float16, relative."""


def growth_of_rounding(update: torch.Tensor, coefficients: Any) -> float:
    """Return how much larger the result's error is at most than one rounding before each step and one at the end.

    A polynomial `f` of a matrix moves what is wrong between two of its singular directions by the slope of `f` between
    their values, or between one and the other's negative.
    """
    values = torch.linalg.svdvals(update.double())
    values = values / values.norm().clamp_min(1e-15)
    grown = torch.zeros(len(values), len(values), dtype=torch.float64)
    for a, b, c in coefficients:
        s = values[:, None]
        slopes = [
            a + b * (s**2 + s * t + t**2) + c * (s**4 + s**3 * t + s**2 * t**2 + s * t**3 + t**4)
            for t in (values, -values)
        ]
        grown = (grown + 1.0) * torch.stack(slopes).abs().amax(0)
        values = values * (a + b * values**2 + c * values**4)
    return float(grown.max()) + 1.0


def in_float16(update: torch.Tensor, coefficients: Any, runs: tuple[int, ...]) -> torch.Tensor:
    """Return the iteration of a matrix of any norm."""
    scale = half_scale(min(update.shape[-2:]))
    norm = torch.linalg.matrix_norm(update.double(), keepdim=True).clamp_min(1e-15)
    x = (update.double() / norm * scale).half()
    tall = update.shape[-2] > update.shape[-1]
    return iterate_half(x, coefficients, runs, scale, tall=tall).float() / scale


@pytest.mark.parametrize("coefficients", ["simple", "quintic"])
@pytest.mark.parametrize("shape", [(96, 96), (192, 48), (64, 256), (320, 480)])
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("runs", [(1, 1, 1, 1, 1), (2, 3)])
def test_it_is_more_accurate_than_single_steps_in_bfloat16(formulas, coefficients, shape, kind, runs):
    """Of every spectrum, in single steps and in runs."""
    triples = resolve_coefficients(coefficients, 5)
    update, exact = formulas.example(kind, *shape, 0, triples)
    plain = formulas.plain_error(kind, *shape, 0, triples, torch.bfloat16)
    assert formulas.error(in_float16(update, triples, runs), exact) <= 0.8 * plain


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 9),
    st.floats(-18.0, 18.0),
    st.data(),
)
def test_any_shape_norm_and_number_of_steps(formulas, rows, columns, matrices, steps, exponent, data):
    """Within a few roundings of each step, grown by those after it: each matrix of a batch by itself."""
    triples = resolve_coefficients("simple", steps)
    update = torch.randn(matrices, rows, columns, generator=torch.Generator().manual_seed(steps))
    update *= 10.0**exponent
    method = data.draw(st.sampled_from(["standard", "gram", "auto"]))
    runs = half_runs(method, triples, *sorted((rows, columns)))
    assert sum(runs) == steps
    found, exact = in_float16(update, triples, runs), formulas.newton_schulz64(update, triples)
    assert found.isfinite().all()
    for one, other, before in zip(found, exact, update, strict=True):
        assert formulas.error(one, other) <= 6.0 * growth_of_rounding(before, triples) * ROUNDING


def test_runs_are_taken_where_they_save_products():
    """Aspect and rows decide, and a kernel for symmetric products moves the line; steep sets go step by step."""
    single, runs = (1, 1, 1, 1, 1), (2, 3)
    assert half_runs("auto", SIMPLE, 768, 3072) == runs
    assert half_runs("auto", SIMPLE, 768, 1024) == single
    assert half_runs("auto", SIMPLE, 768, 1024, 0.7) == runs
    assert half_runs("auto", SIMPLE, 256, 4096) == single
    assert half_runs("gram", SIMPLE, 4, 4) == runs
    assert half_runs("standard", SIMPLE, 768, 3072) == single
    assert half_runs("gram", resolve_coefficients("polar_express", 5), 768, 3072) == single


def test_what_is_chosen_stays():
    """Under `auto`; another method takes its place with a warning, and what cannot run is said."""
    book = MethodBook("auto", SIMPLE, "768x3072:plain", narrow=False)
    assert book.half_runs_of(768, 3072, 1.0) == (1, 1, 1, 1, 1)
    assert book.half_runs_of(512, 4096, 1.0) == (2, 3)
    assert book.text == "512x4096:gram 768x3072:plain"
    with pytest.warns(UserWarning, match="takes the place"):
        book = MethodBook("gram", SIMPLE, "768x3072:plain", narrow=False, half=True)
    assert book.half_runs_of(768, 3072, 1.0) == (2, 3)
    steep = MethodBook("auto", resolve_coefficients("polar_express", 5), "768x3072:gram", narrow=False)
    with pytest.warns(UserWarning, match="768x3072"):
        assert steep.half_runs_of(768, 3072, 1.0) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_forced_method_that_is_stored_is_no_news(steps):
    """A resume warns of nothing that stays as it is, whatever the number of steps."""
    triples = resolve_coefficients("simple", steps)
    before = MethodBook("gram", triples, narrow=False, half=True)
    before.half_runs_of(600, 1400, 1.0)
    assert MethodBook("gram", triples, before.text, narrow=False, half=True).text == before.text


@pytest.mark.parametrize("coefficients", ["simple", "quintic"])
@pytest.mark.parametrize("size", [8, 200])
@pytest.mark.parametrize("runs", [(1, 1, 1, 1, 1), (2, 3)])
def test_no_part_of_a_product_leaves_the_range(monkeypatch, coefficients, size, runs):
    """Of one singular value along an axis, whose squares are largest: libraries keep parts of sums in float16."""
    from megaopt_muon.newton_schulz import half

    largest = []

    def product(left: torch.Tensor, right: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        largest.append(float((left.float() @ right.float()).abs().max()))
        return whole_symmetric(left, right, **kwargs)

    monkeypatch.setattr(half, "whole_symmetric", product)
    update = torch.zeros(size, 2 * size)
    update[0, 0] = 1.0
    update += 1e-4 * torch.randn(update.shape, generator=torch.Generator().manual_seed(0))
    in_float16(update, resolve_coefficients(coefficients, 5), runs)
    assert max(largest) < torch.finfo(torch.float16).max


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterate matrices of a CPU as those of an accelerator."""

    def runs_of(
        self: NewtonSchulz, shape: Any, device: torch.device, book: MethodBook | None
    ) -> tuple[int, ...]:
        del device
        return (book or self.book).half_runs_of(*sorted(shape[-2:]), 1.0)

    monkeypatch.setattr(NewtonSchulz, "half_runs", runs_of)
    for module in (execution, iteration):
        monkeypatch.setattr(module, "is_narrow", lambda *_: False)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
def test_a_step_subtracts_what_the_formula_says(formulas, method):
    """Equal shapes together, wide and tall ones, and one that is seen as several matrices."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(40, 64), (40, 64), (64, 40), (8, 8), (1, 5)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=chance)) for shape in shapes]
    before = [param.detach().double() for param in params]
    optimizer = TensorParallelMuon(
        params, 0.5, 0.0, False, 0.1, coefficient_type="simple", num_ns_steps=5, ns_method=method
    )
    for param in params:
        param.grad = torch.randn(param.shape, generator=chance)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        change = (0.95 * old - param.detach().double()) / (0.5 * optimizer.planner.scale(*param.shape))
        exact = formulas.newton_schulz64(param.grad, SIMPLE)
        plain = formulas.error(formulas.newton_schulz_plain(param.grad, SIMPLE, torch.bfloat16), exact)
        assert formulas.error(change, exact) <= 0.8 * plain


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_the_object_itself_returns_wide_matrices(formulas):
    """Called on one matrix, or on several."""
    update = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0))
    ns = NewtonSchulz(SIMPLE)
    found = ns(update, factor=2.0)
    assert found.dtype is torch.float32
    assert formulas.error(found, 2.0 * formulas.newton_schulz64(update, SIMPLE)) <= 0.005
    assert formulas.error(ns(update[0]), formulas.newton_schulz64(update[0], SIMPLE)) <= 0.005


@pytest.mark.parametrize("decay", [None, Decay(0.9), Decay(0.9, is_cautious=True), Decay(torch.tensor(0.9))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_together_are_those_one_by_one(decay, dtype):
    """What a few calls cannot do is left to one for each parameter."""
    chance = torch.Generator().manual_seed(0)
    params = [torch.randn(4, 6, generator=chance).to(dtype) for _ in range(3)]
    optimizer = TensorParallelMuon([torch.nn.Parameter(param) for param in params], 0.5)
    pieces = [optimizer.planner.plan(param).pieces[0] for param in optimizer.param_groups[0]["params"]]
    values = [torch.randn(4, 6, generator=chance).half() for _ in params]
    changes = [Change(index, pieces[index], values[index], 2.0 + index // 2) for index in range(3)]
    alone, together = ([param.clone() for param in params] for _ in range(2))
    workspace = optimizer.newton_schulz.workspace
    for change in changes:
        change.apply(alone[change.index], 0.25, workspace, decay)
    rest = applied_together(changes, together, 0.25, {dtype: decay})
    plain = dtype is torch.float32 and (
        decay is None or (not decay.is_cautious and type(decay.keep) is float)
    )
    assert rest == ([] if plain else changes)
    for change in rest:
        change.apply(together[change.index], 0.25, workspace, decay)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Calls(TorchDispatchMode):
    """Counts the operations that compute, and the dtypes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.products = 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        computes = (
            name.startswith("aten::") and not func.is_view and "empty" not in name and "detach" not in name
        )
        self.launched += computes
        if "mm" in name:
            self.products.add(out.dtype)
        return out


@pytest.mark.parametrize(("precision", "dtype"), [("medium", torch.float16), ("highest", torch.float32)])
def test_the_step_of_a_gpu_is_few_calls_and_reads_nothing(monkeypatch, precision, dtype):
    """Of 48 matrices in four shapes; a number that the host reads is an error of a tensor without values."""
    monkeypatch.setattr(hopper, "_kernel_of", lambda _: None)
    with FakeTensorMode():
        shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
        params = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        optimizer = TensorParallelMuon(params, 0.02, 0.95, True, 0.1, fp32_matmul_prec=precision)
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
    assert calls.products == {dtype}
    assert calls.launched <= 7 * len(params)
    assert optimizer.newton_schulz.workspace.nbytes == 0


def test_matrices_of_a_cpu_are_in_no_batch_of_a_gpu():
    """Nor are those of two GPUs in one."""
    with FakeTensorMode():
        updates = [torch.empty(4, 6, device=device) for device in ("cpu", "cuda:0", "cuda:1")]
    assert len({batch_key((4, 6), update, narrow=False) for update in updates}) == 3


def test_what_a_subclass_does_to_one_parameter_goes_before_the_next():
    """On a GPU as on a CPU: its hooks may keep what it found when it orthogonalized."""
    told = []

    class Talking(TensorParallelMuon):
        def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            told.append("orthogonalize")
            return super().orthogonalize(p, grad, **kwargs)

        def post_weight_update_fn_inplace(self, p: torch.Tensor) -> None:
            told.append("applied")

    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(8, 8, device="cuda")) for _ in range(2)]
        optimizer = Talking(params, 0.1, fp32_matmul_prec="highest")
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert told == ["orthogonalize", "applied"] * 2
