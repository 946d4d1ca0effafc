"""Lion against its formula in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_lion import lion, update
from megaopt_lion.lion import WEIGHT_DECAY_METHODS, Lion, init_state
from megaopt_lion.update import Numbers, can_compile, update_blockwise, update_compiled, update_together
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt_core.errors import ConfigurationError, GradientError

pytestmark = pytest.mark.any_python

BETAS = (0.95, 0.98)
LR, WD = 0.01, 0.3


def gradients(count: int, shape: tuple[int, ...] = (7, 5)) -> list[torch.Tensor]:
    """Return random gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("method", WEIGHT_DECAY_METHODS)
def test_steps_follow_the_formula(method):
    """Ten steps give the float64 formula with every kind of weight decay; the gradient is not changed."""
    param = nn.Parameter(gradients(11)[-1].clone())
    p, m = param.detach().double(), torch.zeros(7, 5, dtype=torch.float64)
    optimizer = Lion([param], LR, BETAS, WD, weight_decay_method=method)
    for grad in gradients(10):
        g = grad.double() + (WD * p if method == "l2" else 0.0)
        factor = {"decoupled": LR * WD, "independent": WD, "palm": LR * LR * WD, "l2": 0.0}[method]
        direction = torch.sign(BETAS[0] * m + (1 - BETAS[0]) * g)
        p = p * (1 - factor) - LR * direction
        m = BETAS[1] * m + (1 - BETAS[1]) * g
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)
    torch.testing.assert_close(param.double(), p, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"].double(), m, rtol=0, atol=1e-6)


def test_blocks_do_not_show():
    """A tensor of several blocks gives the same bits as its slices, wherever it is cut."""
    size = 300_000
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(size, generator=generator) for _ in range(3))
    whole, cut = [p.clone(), m.clone()], [p.clone(), m.clone()]
    update_blockwise(whole[0], g, whole[1], Numbers(lr=LR, keep=0.9, betas=BETAS))
    for start, stop in ((0, 1000), (1000, 200_008), (200_008, size)):
        rows = slice(start, stop)
        update_blockwise(cut[0][rows], g[rows], cut[1][rows], Numbers(lr=LR, keep=0.9, betas=BETAS))
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


class NewMemory(TorchDispatchMode):
    """Notes the elements of every tensor that is made, but for views and what is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **kwargs or {})
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_bound_memory(dtype):
    """Nothing as large as the parameter is made beside it, also where narrow numbers are computed with as wide ones."""
    p, g, m = (torch.ones(1 << 20, dtype=dtype) for _ in range(3))
    with NewMemory() as made:
        update_blockwise(p, g, m, Numbers(lr=LR, keep=0.9, betas=BETAS))
    assert 0 < made.largest <= 1 << 16


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the number of representable numbers from one to the other."""
    integer = {4: torch.int32, 2: torch.int16}[a.itemsize]
    lowest = torch.iinfo(integer).min
    first, second = (tensor.view(integer).long() for tensor in (a, b))
    return (
        torch.where(first < 0, lowest - first, first) - torch.where(second < 0, lowest - second, second)
    ).abs()


def cancelling(
    beta: float, size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient and a momentum that `beta * momentum + (1 - beta) * gradient` cancels but for rounding."""
    gradient = torch.randint(-50, 50, (size,), generator=generator).double()
    return gradient.to(dtype), (-gradient * (1.0 - beta) / beta).to(dtype)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own internals
@pytest.mark.parametrize(
    ("dtype", "momentum_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_compiled_equals_plain_to_one_ulp(dtype, momentum_dtype):
    """Both ways agree to one unit in the last place of each result, also where everything cancels but the rounding."""
    # Weights beyond one half and learning rates that change are among the cases.
    generator = torch.Generator().manual_seed(0)
    size = 4099
    for step, betas in enumerate(((0.95, 0.98), (0.9, 0.99), (0.3, 0.4), (0.5, 0.75))):
        pairs = [[torch.randn(size, generator=generator) for _ in range(2)]]
        pairs += [cancelling(beta, size, momentum_dtype, generator) for beta in betas]
        for gradient, momentum in pairs:
            p, g = torch.randn(size, generator=generator).to(dtype), gradient.to(dtype)
            m = momentum.to(momentum_dtype)
            plain, compiled = [p.clone(), m.clone()], [p.clone(), m.clone()]
            numbers = Numbers(LR / (step + 1), 1.0 - 0.01 * step, betas)
            update_blockwise(plain[0], g, plain[1], numbers)
            update_compiled([(compiled[0], g, compiled[1])], numbers)
            for a, b in zip(plain, compiled, strict=True):
                assert ulps(a, b).max() <= 1


@pytest.mark.slow
@pytest.mark.skipif(not can_compile("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_calls_take_many_tensors_of_any_sizes(monkeypatch):
    """So many as a call takes go together, the rest alone, compiled once whatever their sizes; to plain Lion's bits."""
    monkeypatch.setattr(lion, "IN_A_CALL", 3)
    calls = []
    monkeypatch.setattr(
        lion,
        "update_compiled",
        lambda triples, numbers: calls.append(len(triples)) or update_compiled(triples, numbers),
    )
    torch.compiler.reset()  # what other tests compiled, with other threads say
    update._kernel.cache_clear()
    for length, dtype in ((3, torch.float32), (1, torch.bfloat16)):
        with torch.no_grad():  # as in a step
            update._kernel(length, *[torch.device("cpu")] * 2, *[dtype] * 3, cautious=False)
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(40_000, generator=generator)
    shapes = [(160, 128), (128, 160), (20_000, 1), (3, 80, 90), (150, 150), (17_001,), (8, 8, 8, 64)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values += [flat[:20_000], flat[20_000:], values[0].bfloat16()]
    plain, compiled = (
        Lion([nn.Parameter(value.clone()) for value in values], betas=BETAS, compile=compile_)
        for compile_ in (False, True)
    )
    for param, value in zip(compiled.param_groups[0]["params"][-3:-1], values[-3:-1], strict=True):
        param.data = value  # two that share their memory
    for _ in range(2):
        pairs = list(zip(*(some.param_groups[0]["params"] for some in (plain, compiled)), strict=True))
        for a, b in pairs:
            a.grad = torch.randn(a.shape, generator=generator).to(a.dtype)
            b.grad = a.grad.clone()
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled.step()
        plain.step()
        for a, b in pairs:
            assert ulps(a, b).max() <= 1
            assert torch.equal(plain.state[a]["exp_avg"], compiled.state[b]["exp_avg"])
    assert calls == [3, 3, 3, 1] * 2


@pytest.mark.slow
@pytest.mark.skipif(not can_compile("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["decoupled", "independent", "palm", "l2"])
def test_a_rate_that_is_a_tensor_is_compiled_too(monkeypatch, method) -> None:
    """To the bits of a step that takes it as a number, with the rate of each step."""
    monkeypatch.setattr(lion, "_WORTH_A_KERNEL", 1)
    generator, calls = torch.Generator().manual_seed(8), []
    monkeypatch.setattr(
        lion,
        "update_compiled",
        lambda triples, numbers: calls.append(numbers) or update_compiled(triples, numbers),
    )
    start = torch.randn(64, 33, generator=generator)
    settings = {"weight_decay": 0.25, "weight_decay_method": method, "compile": True}
    by_number, by_tensor = (Lion([nn.Parameter(start.clone())], **settings) for _ in range(2))
    rate = torch.zeros((), dtype=torch.float32)
    for lr in (0.5, 0.125):
        grad = torch.randn(start.shape, generator=generator)
        for optimizer, given in ((by_number, lr), (by_tensor, rate.fill_(lr))):
            [group] = optimizer.param_groups
            group["lr"], group["params"][0].grad = given, grad.clone()
            optimizer.step()
    assert len(calls) == 4
    assert all(isinstance(numbers.lr, torch.Tensor) for numbers in calls[1::2])
    assert torch.equal(by_number.param_groups[0]["params"][0], by_tensor.param_groups[0]["params"][0])


def test_the_numbers_of_a_kernel_lie_beside_a_rate_that_is_a_tensor() -> None:
    """A kernel of another device would wait for the host to read them."""
    rate = torch.zeros((), dtype=torch.float64, device="meta")
    numbers = Numbers(lr=rate, keep=0.9, betas=BETAS)
    assert {number.device for number in numbers.for_kernel()} == {rate.device}
    assert {number.dtype for number in numbers.for_kernel()} == {torch.float64}


@pytest.mark.slow
@pytest.mark.skipif(not can_compile("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_what_torch_compiles_anew_takes_other_sizes_too() -> None:
    """Who resets the compiler has a step compile with sizes that are equal; those of the next may not be."""
    generator = torch.Generator().manual_seed(6)
    numbers = Numbers(lr=LR, keep=0.9, betas=BETAS)
    update._kernel.cache_clear()
    for sizes in ((100, 200, 300), (20_000, 20_000, 20_000), (20_001, 17_000, 5), (40, 30_000, 40)):
        triples = [tuple(torch.randn(3, size, generator=generator)) for size in sizes]
        expected = [tuple(tensor.clone() for tensor in triple) for triple in triples]
        update_compiled(triples, numbers)
        for plain, compiled in zip(expected, triples, strict=True):
            update_blockwise(*plain, numbers)
            assert ulps(plain[0], compiled[0]).max() <= 1
            assert torch.equal(plain[2], compiled[2])
        if sizes[0] == 100:
            torch.compiler.reset()


@pytest.mark.skipif(not can_compile("cpu"), reason="needs a C++ compiler")
def test_a_gradient_whose_sign_is_only_noted_is_not_compiled() -> None:
    """What imaginary parts of conjugates are: a kernel would read the memory, which has the other sign."""
    param = nn.Parameter(torch.zeros(20_000))
    param.grad = torch._neg_view(torch.ones(20_000))
    Lion([param], lr=1.0, weight_decay=0.0, compile=True).step()
    assert (param == 1.0).all()


@pytest.mark.slow
@pytest.mark.skipif(not can_compile("cpu"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_single_numbers_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes one for a size of 0 or 1 alone; what it compiles anew must not be that for others."""
    monkeypatch.setattr(lion, "_WORTH_A_KERNEL", lion._WORTH_A_KERNEL_ELSEWHERE)  # as on an accelerator
    monkeypatch.setattr(lion, "_is_small", lambda *_: False)
    update._kernel.cache_clear()
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator) for shape in [(), (5000,), (0, 3), (2,), (1, 1)]]
    plain, compiled = (
        Lion([nn.Parameter(value.clone()) for value in values], betas=BETAS, compile=compile_)
        for compile_ in (False, True)
    )
    for _ in range(2):
        pairs = list(zip(*(some.param_groups[0]["params"] for some in (plain, compiled)), strict=True))
        for a, b in pairs:
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        for some in (plain, compiled):
            some.step()
        assert all(torch.equal(a, b) for a, b in pairs)
        torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_operation_is_rounded_once(dtype):
    """The result is that of float32 operations one after the other, stored with one rounding."""
    # The reference computes each of them in float64, where rounding the result to float32 is as if it were exact.
    generator = torch.Generator().manual_seed(0)
    for betas in ((0.95, 0.98), (0.3, 0.4)):
        g, m = cancelling(betas[0], 4099, dtype, generator)
        p = torch.randn(4099, generator=generator).to(dtype)

        def rounded(value):
            return value.float().double()

        wide = [tensor.double() for tensor in (p, g, m)]
        lr, keep, first, second = (
            torch.tensor(value).double() for value in (LR, 0.9, 1.0 - betas[0], 1.0 - betas[1])
        )
        difference = rounded(wide[1] - wide[2])
        direction = rounded(rounded(difference * first) + wide[2]).sign()
        expected = rounded(wide[0] * keep) - direction * lr
        momentum = wide[2] + rounded(difference * second)
        update_blockwise(p, g, m, Numbers(lr=LR, keep=0.9, betas=betas))
        assert torch.equal(p, expected.float().to(dtype))
        assert torch.equal(m, momentum.float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    """Parameters and momentum in other dtypes are stepped in theirs."""
    param = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    param.grad = torch.ones(4, 4, dtype=dtype)
    optimizer = Lion([param], lr=0.5, weight_decay=0.0)
    optimizer.step()
    assert param.dtype is optimizer.state[param]["exp_avg"].dtype is dtype
    assert (param == 0.5).all()


def test_momentum_may_be_narrower_than_the_parameter():
    """A bfloat16 momentum beside a float32 parameter is computed with in float32."""
    param = nn.Parameter(torch.ones(8))
    optimizer = Lion([param], lr=0.5, betas=BETAS, weight_decay=0.0)
    optimizer.state[param]["exp_avg"] = torch.ones(8, dtype=torch.bfloat16)
    param.grad = torch.full((8,), -1.0)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype is torch.bfloat16
    torch.testing.assert_close(
        optimizer.state[param]["exp_avg"].float(), torch.full((8,), 0.96), rtol=0, atol=4e-3
    )
    assert (param == 0.5).all()


def test_memory_that_is_not_contiguous():
    """Transposed parameters are updated in place."""
    stored = torch.zeros(3, 5)
    update_blockwise(
        stored.mT, torch.ones(5, 3), torch.zeros(3, 5).mT, Numbers(lr=1.0, keep=1.0, betas=BETAS)
    )
    assert (stored == -1).all()


def test_small_tensors_go_together_to_the_same_bits(monkeypatch):
    """Many of unlike shapes, in few calls: each becomes what it becomes by itself."""
    calls = []
    monkeypatch.setattr(
        lion, "update_together", lambda *args: calls.append(len(args[0])) or update_together(*args)
    )
    generator = torch.Generator().manual_seed(4)
    shapes = [(), (1,), (0,), (768,), (3, 5), (127, 129), *[(10_000,)] * 9]
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params.append(nn.Parameter(torch.randn(40, 30, generator=generator).T))
    alone = [(param.detach().clone(), torch.zeros_like(param)) for param in params]
    optimizer = Lion(params, lr=LR, betas=BETAS, weight_decay=0.5)
    for _ in range(3):
        numbers = Numbers(lr=LR, keep=1.0 - LR * 0.5, betas=BETAS)
        for param, (own, momentum) in zip(params, alone, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            update_blockwise(own, param.grad, momentum, numbers)
        optimizer.step()
    assert len(calls) == 3 * 2
    assert sum(calls) == 3 * len(params)
    for param, (own, momentum) in zip(params, alone, strict=True):
        assert torch.equal(param, own)
        assert torch.equal(optimizer.state[param]["exp_avg"], momentum)


def test_closure_runs_once_with_gradients():
    """The closure is called once, gradients enabled, and its loss returned."""
    param = nn.Parameter(torch.ones(3))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = param.square().sum()
        loss.backward()
        return loss

    assert Lion([param]).step(closure) == 3.0
    assert calls == [True]


def test_init_state_moves_nothing():
    """State exists for every parameter without a gradient."""
    param = nn.Parameter(torch.ones(3))
    optimizer = Lion([param])
    init_state(optimizer)
    assert optimizer.state[param]["exp_avg"].tolist() == [0.0] * 3
    assert param.tolist() == [1.0] * 3


def test_parameters_without_gradient_are_skipped():
    """A parameter whose grad is None stays, and gets no state."""
    param = nn.Parameter(torch.ones(3))
    optimizer = Lion([param])
    optimizer.step()
    assert param.tolist() == [1.0] * 3
    assert param not in optimizer.state


def test_subclasses_of_tensors_are_not_compiled(monkeypatch):
    """What keeps its memory elsewhere, as a DTensor does, is stepped by plain operations."""

    class Elsewhere(torch.Tensor):
        pass

    monkeypatch.setattr(lion, "update_compiled", None)
    monkeypatch.setattr(lion, "_WORTH_A_KERNEL", 1)
    param = nn.Parameter(torch.ones(3).as_subclass(Elsewhere))
    param.grad = torch.ones(3).as_subclass(Elsewhere)
    Lion([param], lr=1.0, weight_decay=0.0, compile=True).step()
    assert param.tolist() == [0.0] * 3


def test_a_failing_compiler_is_not_the_end(monkeypatch):
    """Where compiling was not asked for and fails, the plain update goes on, with one warning."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)

    def fail(*_, **__):
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    monkeypatch.setattr("megaopt_lion.lion.update_compiled", fail)
    monkeypatch.setattr("megaopt_lion.lion._WORTH_COMPILING", 1)
    monkeypatch.setattr("megaopt_lion.lion._WORTH_A_KERNEL", 1)
    monkeypatch.setattr("megaopt_lion.lion.can_compile", lambda _: True)
    optimizer = Lion([param], lr=1.0, weight_decay=0.0)
    with pytest.warns(UserWarning, match="goes on without torch.compile"):
        optimizer.step()
    assert param.tolist() == [0.0] * 3
    optimizer.step()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        Lion([param], compile=True).step()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"weight_decay_method": "cautious"}, "'cautious'.*decoupled"),
    ],
)
def test_arguments_are_checked(kwargs, message):
    """Each bad argument is named, with what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        Lion([nn.Parameter(torch.ones(1))], **kwargs)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_refused():
    """A sparse gradient is an error that says so."""
    param = nn.Parameter(torch.ones(3, 3))
    param.grad = torch.eye(3).to_sparse()
    with pytest.raises(GradientError, match="sparse"):
        Lion([param]).step()


@pytest.mark.parametrize("method", ["decoupled", "independent", "palm"])
@pytest.mark.parametrize("way", [False, True], ids=["blocks", "compiled"])
def test_cautious_decay_follows_the_formula(method, way):
    """A weight shrinks only where the sign of its update is its own or zero, in every kind of decay."""
    if way and not can_compile("cpu"):
        pytest.skip("no compiler")
    param = nn.Parameter(gradients(11)[-1].clone())
    p, m = param.detach().double(), torch.zeros(7, 5, dtype=torch.float64)
    optimizer = Lion(
        [param], LR, BETAS, WD, weight_decay_method=method, cautious_weight_decay=True, compile=way
    )
    for grad in gradients(10):
        direction = torch.sign(BETAS[0] * m + (1 - BETAS[0]) * grad.double())
        factor = {"decoupled": LR * WD, "independent": WD, "palm": LR * LR * WD}[method]
        p = p - factor * p * (direction * p >= 0) - LR * direction
        m = BETAS[1] * m + (1 - BETAS[1]) * grad.double()
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(param.double(), p, rtol=0, atol=1e-6)


def test_cautious_decay_is_a_setting_of_groups_and_refuses_l2():
    """Two groups may differ, what was saved before the key existed loads, and L2 has no decay to be cautious with."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": [params[0]], "cautious_weight_decay": True}, {"params": [params[1]]}]
    optimizer = Lion(groups, lr=0.5, weight_decay=0.5)
    for param in params:
        param.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    assert params[0].tolist() == [0.25, 1.5, 0.75]
    assert params[1].tolist() == [0.25, 1.25, 0.75]
    old = optimizer.state_dict()
    for group in old["param_groups"]:
        del group["cautious_weight_decay"]
    optimizer.load_state_dict(old)
    assert [group["cautious_weight_decay"] for group in optimizer.param_groups] == [False, False]
    with pytest.raises(ConfigurationError, match="weight_decay_method='l2'"):
        Lion(params, weight_decay_method="l2", cautious_weight_decay=True)
