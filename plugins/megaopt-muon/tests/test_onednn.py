"""Products in float32 by oneDNN: what they are, when they are taken, and what a plan says of them."""

import copy
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from megaopt_muon.choice import calibration, onednn_share
from megaopt_muon.choice.calibration import current_share
from megaopt_muon.choice.methods import MethodBook
from megaopt_muon.choice.rates import Rates
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.notes import param_notes
from megaopt_muon.products import onednn
from megaopt_muon.products.onednn import column_blocks, cuts, filled_up, is_multiplied, onednn_height
from megaopt_muon.products.panels import SymmetricMatrix
from megaopt_muon.products.symmetric import gram_of_columns, symmetric_product
from torch._subclasses.fake_tensor import FakeTensorMode

from megaopt_core.params import MatrixView, ParamInfo, Role

pytestmark = [pytest.mark.any_python, pytest.mark.usefixtures("by_onednn", "no_file")]

CPU = torch.device("cpu")
QUINTIC = resolve_coefficients("quintic", 5)
SHAPES = [(128, 128), (128, 512), (256, 256), (320, 480), (700, 203), (512, 640)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note a number for each product that oneDNN makes."""
    multiply, made = onednn._operation(), list[int]()
    assert multiply is not None
    monkeypatch.setattr(onednn, "_operation", lambda: lambda *args: made.append(1) or multiply(*args))
    return made


def iteration(method: str = "auto", share: float = 0.5, name: str = "quintic") -> NewtonSchulz:
    """Return an iteration in float32 whose products are oneDNN's if its share is small."""
    ns = NewtonSchulz(resolve_coefficients(name, 5), "highest", method)
    object.__setattr__(ns, "book", MethodBook(method, ns.coefficients, narrow=False, share=lambda _: share))
    return ns


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [128, 200, 337, 520])
def test_products_are_right(monkeypatch: pytest.MonkeyPatch, size: int, threads: int) -> None:
    """Gram matrices, and products of symmetric ones with what is added, in one call and block row by block row."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = random(size, 500) / 20.0
    exact = x.double() @ x.double().mT
    filled = torch.full((filled_up(size),) * 2, torch.nan)
    gram = gram_of_columns(column_blocks(x), SymmetricMatrix(filled, onednn=True))
    assert torch.allclose(filled[:size, :size].double(), exact, rtol=0.0, atol=1e-6)
    assert not filled[size:].any()
    assert torch.equal(filled, filled.mT)
    other = SymmetricMatrix((filled.double() @ filled.double() - filled).float(), onednn=True)
    for left, right in ((gram, gram), (gram, other)):
        for factor, plus_left, plus_right in ((1.0, 0.0, 0.0), (0.3, -2.0, 0.0), (-1.0, 0.5, 3.0)):
            out = SymmetricMatrix(torch.full_like(filled, torch.nan), onednn=True)
            plus = {"plus_left": plus_left, "plus_right": plus_right}
            symmetric_product(left, right, out, factor=factor, **plus)
            product = factor * left.values.double() @ right.values.double()
            wanted = product + plus_left * left.values + plus_right * right.values
            scale = (left.values.double().abs() @ right.values.double().abs()).max()
            assert float((out.values - wanted).abs().max()) < 1e-6 * float(scale)


@pytest.mark.parametrize("most", [1, 7, 192, 256])
@pytest.mark.parametrize("length", [1, 2, 191, 192, 193, 255, 256, 257, 400, 4999])
def test_cuts_are_a_partition_into_about_equal_parts(length: int, most: int) -> None:
    """No part is larger than it may be, and there are no more than that takes."""
    parts = cuts(length, most)
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, length)
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) <= most
    assert len(lengths) <= -(-length // most)


@pytest.mark.parametrize("name", ["quintic", "simple", "polar_express", "cans", "aol"])
@pytest.mark.parametrize("kind", ["flat", "linear", "power:0.75", "geometric:4", "half", "spike:10"])
def test_it_is_as_accurate_as_the_plain_iteration(formulas: SimpleNamespace, name: str, kind: str) -> None:
    """The error is within 1.2 times that of torch's own products, whole and one after the other."""
    # Nearly equal numbers round all the same way, up or down by their size: the root mean square over sizes.
    coefficients, errors = resolve_coefficients(name, 5), {"plain": 0.0, "standard": 0.0, "auto": 0.0}
    for (rows, columns), seed in itertools.product(SHAPES, range(2)):
        drawn = (kind, rows, columns, seed, coefficients)
        plain = formulas.plain_error(*drawn, torch.float32)
        errors["plain"] += 1.0
        update, exact = formulas.example(*drawn)
        for method in ("standard", "auto"):
            ns = iteration(method, name=name)
            errors[method] += (formulas.error(ns(update), exact) / plain) ** 2
            assert ns.book.onednn_of(*sorted((rows, columns)), CPU, torch.float32)
    assert max(errors["standard"], errors["auto"]) <= 1.2**2 * errors["plain"], errors


def test_sums_are_short(monkeypatch: pytest.MonkeyPatch, formulas: SimpleNamespace) -> None:
    """Without the cuts, rounding is half as large again and more."""
    drawn = ("power:0.75", 512, 640, 0, QUINTIC)
    update, exact = formulas.example(*drawn)
    plain = formulas.plain_error(*drawn, torch.float32)
    assert formulas.error(iteration("standard")(update), exact) < 1.1 * plain
    monkeypatch.setattr(onednn, "cuts", lambda length, _=0: ((0, length),))
    assert formulas.error(iteration("standard")(update), exact) > 1.3 * plain


def test_what_is_multiplied_from_the_right_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a reference implementation multiplies, which is a thousand times slower."""
    multiply = onednn._operation()
    assert multiply is not None
    seen = []

    def noted(left: torch.Tensor, right: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(right.is_contiguous() or right.mT.is_contiguous())
        return multiply(left, right, *others)

    monkeypatch.setattr(onednn, "_operation", lambda: noted)
    for (rows, columns), method in itertools.product(SHAPES, ("standard", "gram")):
        for shape in ((rows, columns), (columns, rows)):
            iteration(method)(random(*shape))
            iteration(method)(random(2 * rows, columns)[::2])
    iteration()(random(2, 256, 300).transpose(0, 1))
    assert all(seen)
    assert len(seen) > 1000


def test_no_matrix_depends_on_others_or_on_how_it_lies() -> None:
    """A batch is iterated one by one, and a tall matrix is a wide one turned around, to the bit."""
    ns, updates = iteration(), random(3, 200, 300)
    alone = ns(updates[1])
    assert torch.equal(ns(updates)[1], alone)
    assert torch.equal(ns(updates[1].mT).mT, alone)
    assert torch.equal(ns(updates[1].mT.contiguous()).mT, alone)
    assert not torch.equal(iteration(share=1.0)(updates[1]), alone)


def test_small_matrices_and_other_dtypes_are_torchs() -> None:
    """A call takes as long as a product of 100 rows, and the operator multiplies float32 as float32 only."""
    assert is_multiplied(128, torch.float32, CPU)
    assert not is_multiplied(127, torch.float32, CPU)
    assert not is_multiplied(256, torch.float64, CPU)
    assert not is_multiplied(256, torch.bfloat16, CPU)
    assert not is_multiplied(256, torch.float32, torch.device("meta"))
    assert onednn_height(128) == 128


@pytest.mark.parametrize("wrong", ["missing", "raises", "another result"])
def test_without_the_operator_torch_multiplies(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """It is no public one: where it is gone, takes other arguments, or gives something else, nothing is lost."""

    def broken(*_: Any) -> torch.Tensor:
        if wrong == "raises":
            raise RuntimeError("expected 7 arguments")
        return torch.zeros(96, 32)

    operator = SimpleNamespace(default=broken)
    holder = SimpleNamespace() if wrong == "missing" else SimpleNamespace(_linear_pointwise=operator)
    monkeypatch.setattr(onednn.torch.ops, "mkldnn", holder)
    onednn._tried_operation.cache_clear()
    try:
        assert not is_multiplied(256, torch.float32, CPU)
        assert onednn_share.onednn_share(256, 1, least=1, most=1) == 1.0
        expected = iteration(share=1.0)(random(256, 256))
        assert torch.equal(iteration()(random(256, 256)), expected)
    finally:
        monkeypatch.undo()
        onednn._tried_operation.cache_clear()


def stepped(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, grads: torch.Tensor) -> None:
    """Take a step with each gradient."""
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


@pytest.mark.parametrize(("share", "plan"), [(0.89, "256x256:plain+onednn"), (0.91, "256x256:plain")])
def test_a_group_and_the_report_say_who_multiplies(
    monkeypatch: pytest.MonkeyPatch, share: float, plan: str
) -> None:
    """It is oneDNN where that takes less than nine tenths of the time."""
    monkeypatch.setattr("megaopt_muon.choice.books.current_share", lambda _: share)
    param = torch.nn.Parameter(random(256, 256))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView())  # type: ignore[attr-defined]
    optimizer = TensorParallelMuon([param], fp32_matmul_prec="highest")
    stepped(optimizer, param, random(1, 256, 256))
    assert optimizer.param_groups[0]["ns_plan"] == plan
    assert param_notes(optimizer) == {"w": plan.partition(":")[2]}


@pytest.mark.parametrize("plan", ["256x320:plain+onednn", "256x320:plain", "256x320:gram+onednn"])
def test_a_resume_multiplies_as_before(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """Whatever would be faster here; and it gives the same bits."""
    start, grads = random(256, 320), random(3, 256, 320, seed=1)
    straight, saved, resumed = (torch.nn.Parameter(start.clone()) for _ in range(3))
    asked = {"fp32_matmul_prec": "highest"}
    stepped(TensorParallelMuon([straight], ns_plan=plan, **asked), straight, grads)
    before = TensorParallelMuon([saved], ns_plan=plan, **asked)
    stepped(before, saved, grads[:2])
    monkeypatch.setattr("megaopt_muon.choice.books.current_share", pytest.fail)
    after = TensorParallelMuon([resumed], **asked)
    resumed.data.copy_(saved)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    stepped(after, resumed, grads[2:])
    assert after.param_groups[0]["ns_plan"] == plan
    assert torch.equal(resumed, straight)


@pytest.mark.parametrize("kind", ["bfloat16", "float64", "no operator"])
@pytest.mark.usefixtures("in_bfloat16")
def test_a_plan_that_cannot_run_here_is_said_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What another machine, precision or dtype stored; torch multiplies, and the plan says so."""
    precision = "medium" if kind == "bfloat16" else "highest"
    dtype = torch.float64 if kind == "float64" else torch.float32
    if kind == "no operator":
        monkeypatch.setattr(onednn, "_operation", lambda: None)
    param = torch.nn.Parameter(random(256, 320).to(dtype))
    optimizer = TensorParallelMuon([param], ns_plan="256x320:plain+onednn", fp32_matmul_prec=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(optimizer, param, random(2, 256, 320).to(dtype))
    assert ["256x320 as torch does: oneDNN" in str(warning.message) for warning in caught] == [True]
    assert optimizer.param_groups[0]["ns_plan"] == "256x320:plain"


@pytest.mark.parametrize(
    ("forced", "stored", "told"), [("standard", "gram", "plain"), ("gram", "plain", "gram")]
)
def test_a_forced_method_leaves_who_multiplies(forced: str, stored: str, told: str) -> None:
    """`muon_ns_method` says which steps are run together."""
    with pytest.warns(UserWarning, match=f"256x512:{told}, not 256x512:{stored}$"):
        book = MethodBook(forced, QUINTIC, f"256x512:{stored}+onednn", narrow=False, relaxed=True)
    assert book.text == f"256x512:{told}+onednn"
    assert book.onednn_of(256, 512, CPU, torch.float32)


def test_nothing_is_measured_where_runs_are_to_be_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of deterministic runs, and of several ranks that were told nothing, torch's own products are everybody's."""
    monkeypatch.setattr(calibration, "probed_share", pytest.fail)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert current_share(256) == 1.0
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "probed_share", lambda small: small / 1000)
    assert current_share(256) == 0.256


def test_a_share_is_measured_once_for_about_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for each number of threads."""
    asked = []
    monkeypatch.setattr(onednn_share, "onednn_share", lambda *size, **_: asked.append(size) or 0.5)
    onednn_share._measured.cache_clear()
    for small in (128, 140, 250, 256, 300, 448, 4096, 130):
        assert onednn_share.probed_share(small) == 0.5
    assert asked == [(128, 1), (192, 1), (256, 1), (448, 1)]
    onednn_share._measured.cache_clear()
    monkeypatch.undo()
    assert 0.0 < onednn_share.onednn_share(128, 2, least=1, most=1) < 100.0


@pytest.mark.parametrize("dtypes", list(itertools.permutations([torch.float32, torch.float64])))
def test_each_dtype_of_a_shape_is_multiplied_by_what_can(dtypes: tuple[torch.dtype, ...]) -> None:
    """Whichever is met first; the report tells them apart, and a checkpoint's plan is right for both."""
    params = [torch.nn.Parameter(random(200, 256).to(dtype)) for dtype in dtypes]
    for number, param in enumerate(params):
        param.param_info = ParamInfo(f"w{number}", Role.MATRIX, MatrixView())  # type: ignore[attr-defined]
        param.grad = random(200, 256, seed=number).to(param.dtype)
    optimizer = TensorParallelMuon(params, fp32_matmul_prec="highest")
    for _ in range(2):
        optimizer.step()
    assert optimizer.param_groups[0]["ns_plan"] == "200x256:plain+onednn"
    told = {torch.float32: "plain+onednn", torch.float64: "plain"}
    assert param_notes(optimizer) == {f"w{number}": told[dtype] for number, dtype in enumerate(dtypes)}


@pytest.mark.parametrize(("shape", "method"), [((192, 3072), "gram"), ((192, 200), "plain")])
def test_runs_are_taken_as_with_torchs_products(shape: tuple[int, int], method: str) -> None:
    """Of long matrices they save more than what multiplies."""
    param = torch.nn.Parameter(random(*shape))
    optimizer = TensorParallelMuon([param], fp32_matmul_prec="highest")
    stepped(optimizer, param, random(1, *shape))
    assert optimizer.param_groups[0]["ns_plan"] == f"{shape[0]}x{shape[1]}:{method}+onednn"


@pytest.mark.parametrize("library", ["+onednn", ""])
@pytest.mark.parametrize("threads", [(1, 2), (2, 1)])
def test_the_number_of_threads_may_change_between_steps(library: str, threads: tuple[int, int]) -> None:
    """With it block rows change, and nothing of the step before may be taken for what this one needs."""
    shapes = [(399, 1600), (400, 1600), (1000, 2000)]
    params = [torch.nn.Parameter(random(*shape)) for shape in shapes]
    plan = " ".join(f"{rows}x{columns}:gram{library}" for rows, columns in shapes)
    optimizer = TensorParallelMuon(params, ns_plan=plan, fp32_matmul_prec="highest", momentum=0.0)
    before = torch.get_num_threads()
    try:
        for count, steep in zip(threads, (True, False), strict=True):
            torch.set_num_threads(count)
            for param in params:
                param.grad = random(*param.shape)
                if steep:  # which allows no runs
                    param.grad[:10] *= 100.0
            optimizer.step()
            params[0].grad = None
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("text", ["256x320:plain", "256x320:plain+onednn"])
@pytest.mark.parametrize("kind", ["highest", "medium"])
@pytest.mark.usefixtures("in_bfloat16")
def test_what_has_blown_up_is_iterated_again_by_the_same_library(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], kind: str, text: str
) -> None:
    """Also where this process has measured that the other is faster."""
    if kind == "medium" and text.endswith("+onednn"):
        text = "256x320:plain"  # which 16 bits cannot have
    monkeypatch.setattr(calibration, "probed_share", lambda _: 0.5)
    param = torch.nn.Parameter(random(256, 320))
    optimizer = TensorParallelMuon(
        [param],
        ns_plan=text,
        fp32_matmul_prec=kind,
        coefficient_type="custom",
        coefficients=((4.5, -9.0, 5.5),) * 6,
        num_ns_steps=6,
    )
    stepped(optimizer, param, random(1, 256, 320))
    assert bool(calls) == text.endswith("+onednn")


def test_a_user_may_disable_it_for_some_steps(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Meanwhile torch's own library multiplies, and the plan stays."""
    param, grads = torch.nn.Parameter(random(256, 256)), random(1, 256, 256)
    optimizer = TensorParallelMuon([param], fp32_matmul_prec="highest")
    for enabled in (False, True, False):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends, "mkldnn", SimpleNamespace(enabled=enabled))
            stepped(optimizer, param, grads)
        assert bool(calls) == enabled
    assert optimizer.param_groups[0]["ns_plan"] == "256x256:plain+onednn"


@pytest.mark.parametrize("shape", [(200, 300), (500, 600)])
def test_a_factor_of_zero_multiplies_nothing(shape: tuple[int, int]) -> None:
    """Squares of a Gram matrix may have left the range of float32; torch's products do not read them either."""
    ns = NewtonSchulz(((1e4, 0.0, 0.0),) * 5, "highest")
    object.__setattr__(ns, "book", MethodBook("auto", ns.coefficients, narrow=False, share=lambda _: 0.5))
    update = random(*shape)
    expected = update.double() / update.double().norm() * 1e20
    assert torch.allclose(ns(update).double(), expected, rtol=1e-5)


def test_a_mode_that_tensors_are_made_in_settles_nothing() -> None:
    """What cannot be tried under it is tried again."""
    onednn._tried_operation.cache_clear()
    with FakeTensorMode():
        is_multiplied(256, torch.float32, CPU)
    assert is_multiplied(256, torch.float32, CPU)


def test_a_calibration_of_before_leaves_it_to_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is allowed."""
    old = Rates(size=256, gram=1e-12, square=1e-12, apply=1e-12, pass_=1e-10)
    monkeypatch.setattr(calibration, "stored_rates", lambda: (old,))
    monkeypatch.setattr(calibration, "probed_share", lambda _: 0.25)
    assert current_share(256) == 0.25
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert current_share(256) == 1.0
    monkeypatch.setattr(calibration, "stored_rates", lambda: (evolve(old, onednn=0.75),))
    assert current_share(256) == 0.75
