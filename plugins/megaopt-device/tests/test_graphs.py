"""The inner step as a graph: captured, replayed with new numbers, captured anew, or left alone with the reason.

What captures here writes operations down on a CPU, as CUDA's graphs do on a device; `tests/gpu` has the same for CUDA.
"""

import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_device.graphs import CapturedStep, CudaCapture
from megaopt_device.graphs.captured_step import RECAPTURES, WARM_UP
from megaopt_testing import temporary_plugin
from torch import nn
from torch.optim.optimizer import ParamsT

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.errors import UnusedSettingWarning
from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))
from recording import RecordingCapture

pytestmark = pytest.mark.any_python


class Signed(torch.optim.Optimizer):
    """Tensors only, of which a graph can be made; settings choose what it does that a graph cannot hold."""

    def __init__(self, params: ParamsT, lr: float = 0.1, beta: float = 0.9, habit: str = "none") -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.habit = habit

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                    state["count"] = 0
                if self.habit == "counts":
                    state["count"] += 1
                if self.habit == "replaces":
                    state["momentum"] = state["momentum"] * group["beta"] + param.grad
                else:
                    state["momentum"].mul_(group["beta"]).add_(param.grad)
                if self.habit == "waits":
                    param.sub_(state["momentum"], alpha=float(torch.as_tensor(group["lr"])))
                else:
                    param.sub_(state["momentum"] * group["lr"])


class Moments(torch.optim.Optimizer):
    """Two moments, in tensors alone; it may refuse to be captured half way."""

    refuses = staticmethod(lambda: False)

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                if number and self.refuses():
                    raise RuntimeError("not in a capture")
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 0.125)
                state["exp_avg_sq"].lerp_(param.grad.square(), 0.125)
                param.sub_(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 0.001) * group["lr"])


ALL = frozenset({torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8})


def _kwargs(habit: str) -> Callable[..., dict[str, Any]]:
    return lambda config, chunks, pgs: {"lr": config.lr, "habit": habit}


class Plugin:
    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        habits = ("none", "counts", "replaces", "waits")
        moments = OptimizerEntry(Moments, state_dtypes={"exp_avg": ALL, "exp_avg_sq": ALL})
        return {"moments": moments} | {
            f"signed_{habit}": OptimizerEntry(Signed, config_to_kwargs=_kwargs(habit)) for habit in habits
        }


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register it for every test here."""
    with temporary_plugin(Plugin(), "signed"):
        yield


def make(
    name: str = "signed_none", *, dtype: torch.dtype = torch.float32, capture: bool = True, **settings: Any
) -> tuple[nn.Sequential, MegatronOptimizer, RecordingCapture]:
    """Return a model, its optimizer, and what captures: in place of CUDA."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 8)).to(dtype)
    settings = {
        "lr": 0.125,
        "clip_grad": 0.0,
        "weight_decay": 0.0,
        "bf16": dtype is torch.bfloat16,
        **settings,
    }
    optimizer = build_optimizer(model, name, **settings)
    recording = RecordingCapture()
    for part in optimizer.parts if capture else ():
        part.runner = CapturedStep(name, recording)
    return model, optimizer, recording


def train(
    model: nn.Module,
    optimizer: MegatronOptimizer,
    steps: Iterable[int],
    rate: Callable[[int], float] = lambda step: 0.125,
) -> None:
    """Train with a learning rate for each step; gradients are new tensors every time."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        generator = torch.Generator().manual_seed(step)
        loss = (
            model(torch.randn(4, 16, generator=generator).to(next(model.parameters()).dtype))
            .float()
            .square()
            .mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def values(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Every value, by name."""
    found = dict(model.state_dict())
    for param, name in optimizer.names.items():
        found.update(
            {
                f"{name}.{key}": value
                for key, value in optimizer.state[param].items()
                if isinstance(value, torch.Tensor)
            }
        )
    return found


def assert_same(
    one: tuple[nn.Module, MegatronOptimizer, *tuple[Any, ...]],
    other: tuple[nn.Module, MegatronOptimizer, *tuple[Any, ...]],
) -> None:
    """Compare all values of two runs, bit for bit."""
    expected, found = values(*one[:2]), values(*other[:2])
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def train_with_other_betas(model: nn.Module, optimizer: MegatronOptimizer, steps: int) -> None:
    """Train with a beta of its own for each step."""
    for step in range(steps):
        for group in optimizer.param_groups:
            group["beta"] = 0.9 - step / 1000
        train(model, optimizer, [step])


def train_without_first_gradient(run: tuple[nn.Sequential, MegatronOptimizer, RecordingCapture]) -> None:
    """Six steps, then two without a gradient for the first parameter."""
    model, optimizer, _ = run
    train(model, optimizer, range(6))
    for step in (6, 7):
        generator = torch.Generator().manual_seed(step)
        for param in list(model.parameters())[1:]:
            param.grad = torch.randn(param.shape, generator=generator)
        model[0].weight.grad = None
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_replays_are_the_steps(dtype, clip) -> None:
    """New gradients, main parameters, clip factors and a schedule reach the graph; nothing is captured twice."""
    # Powers of two, so that a rate has the same bits as a number and as an fp32 tensor.
    rates = lambda step: 2.0 ** -(3 + step % 3)  # noqa: E731
    eager, captured = make(dtype=dtype, clip_grad=clip, capture=False), make(dtype=dtype, clip_grad=clip)
    train(*eager[:2], range(10), rates)
    train(*captured[:2], range(10), rates)
    assert_same(eager, captured)
    assert (captured[2].warm_ups, captured[2].captures, captured[2].replays) == (WARM_UP, 1, 10 - WARM_UP)
    assert [group["lr"] for group in captured[1].param_groups] == [rates(9)] * len(captured[1].param_groups)


AWARE = {"use_precision_aware_optimizer": True}
STORED = {
    "remainders": {**AWARE},
    "bf16": {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp8": {**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "8 bits": {**AWARE, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "8 bits, random": {
        **AWARE,
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "uint8",
        "stochastic_state_rounding": True,
    },
    "bf16 gradients": {**AWARE, "main_grads_dtype": "bf16"},
    "main copies": {**AWARE, "store_param_remainders": False},
}


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("stored", STORED)
def test_what_is_stored_in_less_is_decoded_and_encoded_in_the_graph(stored, clip) -> None:
    """Remainders, narrow and 8-bit states: the bits of eager steps, codes too, and one capture."""
    settings = {"dtype": torch.bfloat16, "clip_grad": clip, **STORED[stored]}
    eager, captured = make("moments", capture=False, **settings), make("moments", **settings)
    train(*eager[:2], range(10))
    train(*captured[:2], range(10))
    assert_same(eager, captured)
    assert codes(eager[1]).keys() == codes(captured[1]).keys()
    assert all(torch.equal(value, codes(captured[1])[key]) for key, value in codes(eager[1]).items())
    assert (captured[2].warm_ups, captured[2].captures, captured[2].replays) == (WARM_UP, 1, 10 - WARM_UP)


def codes(optimizer: MegatronOptimizer) -> dict[tuple[int, int, str], Any]:
    """What inner optimizers keep between steps, as it is stored."""
    return {
        (number, index, key): value
        for number, part in enumerate(optimizer.parts)
        for index, tensor in enumerate(part.stepped)
        for key, value in part.inner.state[tensor].items()
    }


def test_states_that_a_step_replaces_are_copied_back_in_the_graph() -> None:
    """A graph goes on with the memory that it knows."""
    eager, captured = make("signed_replaces", capture=False), make("signed_replaces")
    train(*eager[:2], range(10))
    train(*captured[:2], range(10))
    assert_same(eager, captured)
    assert (captured[2].captures, captured[2].replays) == (1, 10 - WARM_UP)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_lion_is_captured(decay, cautious) -> None:
    """Its learning rate is read by nobody."""
    settings = {"weight_decay": decay, "cautious_weight_decay": cautious}
    rates = lambda step: 2.0 ** -(5 + step % 3)  # noqa: E731
    eager, captured = make("lion", capture=False, **settings), make("lion", **settings)
    train(*eager[:2], range(10), rates)
    train(*captured[:2], range(10), rates)
    assert_same(eager, captured)
    assert (captured[2].captures, captured[2].replays) == (1, 10 - WARM_UP)


def test_a_clip_factor_that_comes_and_goes_leads_to_two_graphs() -> None:
    """Each is captured once, and kept."""
    runs = make("adam", capture=False), make("adam")
    for model, optimizer, _ in runs:
        for part in optimizer.parts:
            for group in part.inner.param_groups:
                group["lr"] = 0.125
        for step in range(16):
            for number, param in enumerate(model.parameters()):
                chance = torch.Generator().manual_seed(100 * step + number)
                param.grad = torch.randn(param.shape, generator=chance)
            if step % 2:
                optimizer.prepare_grads()
                optimizer.clip_grad_norm(0.5)
                optimizer.step_with_ready_grads()
            else:
                optimizer.step()
    assert_same(runs[0], runs[1])
    assert runs[1][2].captures in {1, 2}
    assert runs[1][2].warm_ups + runs[1][2].replays == 16


@pytest.mark.parametrize("name", ["sgd", "muon", "soap"])
def test_optimizers_of_ours_are_captured_or_say_why_not(name) -> None:
    """The steps are the eager ones in either case; who cannot be captured names the reason once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager, captured = make(name, capture=False), make(name)
        train(*eager[:2], range(8))
        train(*captured[:2], range(8))
    assert_same(eager, captured)
    reasons = [part.runner.why_not for part in captured[1].parts]
    assert len([each for each in caught if "without a graph" in str(each.message)]) == len(
        list(filter(None, reasons))
    )
    assert captured[2].captures == reasons.count(None)
    if name == "sgd":
        assert reasons == [None]
    if name == "soap":
        assert any(reasons)


def test_a_class_that_knows_better_is_told_of_at_the_build(monkeypatch) -> None:
    """SOAP is named, with its reason, where others of the same model are captured; the report has it too."""
    from megaopt_device import plugin

    captures = []

    def captured(name):
        captures.append(RecordingCapture())
        return CapturedStep(name, captures[-1])

    monkeypatch.setattr(plugin, "CapturedStep", captured)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    model[0].weight.use_muon = True
    with pytest.warns(
        UnusedSettingWarning, match="'soap' is stepped without a graph.*counts its steps on the host"
    ):
        optimizer = build_optimizer(model, "soap", lr=0.125, adam_beta2=0.95, optimizer_cuda_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said a second time
        warnings.filterwarnings("ignore", "SOAP moved", UserWarning)
        train(model, optimizer, range(6))
    assert [bool(part.runner.why_not) for part in optimizer.parts] == [True, False]
    assert [capture.captures for capture in captures] == [0, 1]
    assert "'soap' is not captured: it counts its steps" in str(optimizer.report().unused_settings)


def test_muon_is_captured_where_it_reads_no_norm(monkeypatch) -> None:
    """As on a GPU, where norms of single matrices are computed as those of batches are: the rate is a tensor too."""
    from megaopt_muon.newton_schulz import iteration as newton_schulz
    from megaopt_muon.newton_schulz import norms
    from megaopt_muon.pieces import batches

    def as_a_batch(update, out, eps=1e-15, size=1.0):
        return norms.normalized(update.unsqueeze(0), out.unsqueeze(0), eps, size).squeeze(0)

    def one_by_one(updates, out, eps):
        for update, slot in zip(updates, out, strict=True):
            as_a_batch(update, slot, eps)

    monkeypatch.setattr(batches, "all_normalized", one_by_one)
    monkeypatch.setattr(newton_schulz, "normalized", as_a_batch)
    monkeypatch.setattr(norms, "within_range", lambda update, found: (update, found))
    runs = []
    for capture in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)), nn.LayerNorm(16))
        for layer in list(model)[:4]:
            layer.weight.use_muon = True
        optimizer = build_optimizer(
            model,
            "muon",
            lr=0.125,
            clip_grad=0.0,
            weight_decay=0.125,
            muon_fp32_matmul_prec="highest",
            muon_coefficient_type="simple",
        )
        recording = RecordingCapture()
        for part in optimizer.parts if capture else ():
            part.runner = CapturedStep("muon", recording)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, range(8))
        runs.append((model, optimizer, recording))
    assert_same(*runs)
    assert runs[1][1].parts[0].runner.why_not is None


def test_what_a_graph_holds_as_a_number_leads_to_a_new_one() -> None:
    """Another weight decay or beta is captured at once, without warming up again."""
    eager, captured = make(capture=False), make()
    for model, optimizer, _ in (eager, captured):
        train(model, optimizer, range(6))
        for group in optimizer.param_groups:
            group["beta"] = 0.5
        train(model, optimizer, range(6, 10))
    assert_same(eager, captured)
    assert (captured[2].warm_ups, captured[2].captures, captured[2].replays) == (WARM_UP, 2, 10 - WARM_UP)


def test_states_in_new_memory_lead_to_a_new_graph() -> None:
    """A load, and a phase on the CPU."""
    eager, captured = make(capture=False), make()
    for model, optimizer, _ in (eager, captured):
        train(model, optimizer, range(6))
        optimizer.offload_to_cpu()
        optimizer.restore_from_cpu()
        train(model, optimizer, range(6, 12))
        for part in optimizer.parts:
            for state in part.inner.state.values():
                state["momentum"] = state["momentum"].clone()
        train(model, optimizer, range(12, 15))
    assert_same(eager, captured)
    assert captured[2].captures == 3


def test_a_number_that_changes_in_every_step_is_named() -> None:
    """Capturing for every step is slower than none."""
    model, optimizer, recording = make()
    with pytest.warns(
        UnusedSettingWarning, match="'beta' of a group changes so often that graphs are hardly replayed"
    ):
        train_with_other_betas(model, optimizer, WARM_UP + RECAPTURES + 3)
    captures = recording.captures
    train(model, optimizer, [99])
    assert recording.captures == captures


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("counts", r"a step changes what is kept on the host \(state of parameter 0 of group 0: count\)"),
        ("waits", "capturing failed: operation not permitted when stream is capturing"),
    ],
)
def test_steps_that_a_graph_cannot_hold_are_made_eagerly(habit, reason) -> None:
    """One warning that names why; the values are right."""
    eager, captured = make(f"signed_{habit}", capture=False), make(f"signed_{habit}")
    train(*eager[:2], range(8))
    with pytest.warns(UnusedSettingWarning, match=reason) as caught:
        train(*captured[:2], range(8))
    assert len(caught) == 1
    assert_same(eager, captured)
    assert captured[2].replays == 0


def test_parameters_without_gradients_are_refused() -> None:
    """A graph would step them with an old one."""
    eager, captured = make(capture=False), make()
    with pytest.warns(UnusedSettingWarning, match="1 of 6 parameters have no gradient") as caught:
        train_without_first_gradient(captured)
    train_without_first_gradient(eager)
    assert len(caught) == 1
    assert_same(eager, captured)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "'adam' is not captured: parameters are on cpu, and CUDA captures for one"),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, "'adam' is not captured"),
    ],
)
def test_where_there_is_no_cuda_one_warning_says_so(settings, reason) -> None:
    """At the build; the report keeps it, and training goes on."""
    with pytest.warns(UnusedSettingWarning) as caught:
        model, optimizer, _ = make("adam", capture=False, optimizer_cuda_graph=True, **settings)
    assert len(caught) == 1
    assert f"optimizer_cuda_graph=True: {reason}" in str(caught[0].message)
    train(model, optimizer, range(3))
    plain = make("adam", capture=False, **settings)
    train(*plain[:2], range(3))
    assert_same(plain, (model, optimizer))


def test_a_phase_on_the_cpu_frees_what_captures_keep() -> None:
    """Graphs, their gradients, and the pool."""
    model, optimizer, recording = make()
    train(model, optimizer, range(6))
    optimizer.offload_to_cpu()
    assert recording.releases == 1
    optimizer.restore_from_cpu()
    train(model, optimizer, range(6, 12))
    assert recording.captures == 2


def test_a_capture_that_fails_leaves_everything_as_it_was() -> None:
    """States that are half decoded, memory that was lent, gradients: the step is made eagerly all the same."""
    settings = {"dtype": torch.bfloat16, **STORED["8 bits"]}
    eager, captured = make("moments", capture=False, **settings), make("moments", **settings)
    for part in captured[1].parts:
        part.inner.refuses = lambda: captured[2].is_capturing
    train(*eager[:2], range(8))
    with pytest.warns(UnusedSettingWarning, match="capturing failed: not in a capture"):
        train(*captured[:2], range(8))
    assert_same(eager, captured)
    assert captured[2].replays == 0


def test_cuda_is_called_as_torch_declares_it(monkeypatch) -> None:
    """Streams wait for each other; captures have thread-local errors, one pool, and the stream of warm-ups."""
    calls = []

    class Stream:
        def __init__(self, device):
            calls.append(("stream", str(device)))

        def wait_stream(self, other):
            calls.append("wait")

    class Graph:
        replay = staticmethod(lambda: calls.append("replay"))
        pool = staticmethod(lambda: "pool")

    class Context:
        def __init__(self, *given, **how):
            calls.append((given[1:], {key: value for key, value in how.items() if key != "stream"}))

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *error):
            calls.append("exit")

    import inspect

    real = inspect.signature(torch.cuda.graph.__init__)
    real.bind(None, object(), pool=None, stream=None, capture_error_mode="thread_local")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Context)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Context)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    capture = CudaCapture(torch.device("cuda:1"))
    capture.warm_up(lambda: calls.append("action"))
    assert [call for call in calls if isinstance(call, str)] == ["wait", "enter", "action", "exit", "wait"]
    assert modes == ["warn", 0]

    def waits():
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)
        warnings.warn(
            "called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's words for itself reach nobody
        assert capture.warm_up(waits).startswith("a step waits for the device (test_graphs.py, line ")
    with pytest.warns(UserWarning, match="something else"):
        assert capture.warm_up(lambda: warnings.warn("something else", UserWarning, stacklevel=1)) is None
    calls.clear()
    for pool in (None, "pool", None):
        if pool is None:
            capture.release()
        replay = capture.capture(lambda: calls.append("action"))
        how = {"pool": pool, "capture_error_mode": "thread_local"}
        assert calls == [((), how), "enter", "action", "exit"]
        replay()
        assert calls.pop() == "replay"
        calls.clear()


def test_a_norm_that_is_not_finite_is_skipped_before_the_graph() -> None:
    """The read between measuring and stepping stays."""
    model, optimizer, recording = make(dtype=torch.bfloat16)
    train(model, optimizer, range(6))
    replays, before = recording.replays, values(model, optimizer)
    before = {name: value.clone() for name, value in before.items()}
    for param in model.parameters():
        param.grad = torch.full_like(param, math.inf)
    assert not optimizer.step().update_successful
    assert recording.replays == replays
    assert all(torch.equal(value, before[name]) for name, value in values(model, optimizer).items())


def test_nothing_is_collected_during_a_capture() -> None:
    """A graph among the garbage would end the capture; afterwards the collector is as it was."""
    from megaopt_device.graphs.capture import _nothing_collected

    with _nothing_collected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with _nothing_collected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_tensors_that_consist_of_others_are_kept() -> None:
    """Such as those of quantized states, which have no memory of their own: what a graph reads of them stays."""
    from megaopt_device.graphs.static import _Touched
    from torch.testing._internal.two_tensor import TwoTensor

    state, plain = TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(2)
    with _Touched() as touched:
        (state * 2.0).add_(plain)
    assert {id(state), id(plain)} <= touched.tensors.keys()
