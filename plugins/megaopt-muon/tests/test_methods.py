"""Which way a shape is iterated, where that is kept, and what it is chosen from."""

import copy
import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import asdict
from megaopt_muon.choice import calibration
from megaopt_muon.choice import rates as rates_module
from megaopt_muon.choice.calibration import VARIABLE, current_rates, stored_rates_of, write_calibration
from megaopt_muon.choice.methods import MethodBook, choose_method
from megaopt_muon.choice.plan_text import parsed_plan
from megaopt_muon.choice.rates import DEFAULT, Rates, calibrated, probe, processor_kind
from megaopt_muon.choice.schedule import plan_blocks
from megaopt_muon.choice.spectrum import Spectrum
from megaopt_muon.choice.step_cost import step_cost
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz import iteration as newton_schulz
from megaopt_muon.newton_schulz import wide
from megaopt_muon.notes import param_notes
from megaopt_muon.plugin import megaopt_commands
from megaopt_muon.products import precision
from megaopt_testing import run_command

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointMismatchError, ConfigurationError
from megaopt_core.params import Granularity, MatrixView, ParamInfo, ParamSpec, Role

main = partial(run_command, megaopt_commands)

pytestmark = pytest.mark.any_python

QUINTIC = resolve_coefficients("quintic", 5)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Name a calibration that is not there yet."""
    path = tmp_path / "folder" / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    stored_rates_of.cache_clear()
    yield path
    stored_rates_of.cache_clear()


def test_time_decides():
    """Runs are taken where the measured rates say that they are faster by a tenth."""
    slow_squares = Rates(size=512, gram=1e-12, square=4e-12, apply=1e-12, pass_=1e-10)
    fast_squares = Rates(size=512, gram=1e-12, square=1e-13, apply=1e-12, pass_=1e-13)
    for shape, rates, expected in (
        ((768, 768), DEFAULT, "plain"),
        ((768, 3072), DEFAULT, "gram"),
        ((768, 2304), slow_squares, "plain"),
        ((768, 1152), fast_squares, "gram"),
    ):
        assert choose_method("auto", QUINTIC, *shape, lambda _, rates=rates: rates) == expected


def test_accuracy_decides_what_is_allowed():
    """No rate allows runs of steep coefficients, of another number of steps, or of small matrices."""
    for coefficients in (resolve_coefficients("cans", 5), resolve_coefficients("quintic", 6)):
        assert choose_method("auto", coefficients, 768, 7680, lambda _: DEFAULT) == "plain"
        assert choose_method("gram", coefficients, 768, 7680, lambda _: DEFAULT) == "plain"
    assert choose_method("gram", QUINTIC, 128, 4096, lambda _: DEFAULT) == "plain"


@pytest.mark.usefixtures("in_bfloat16")
def test_the_norm_of_the_gram_matrix_is_found_on_the_way(monkeypatch):
    """Runs are allowed by the Frobenius norm, which the first product tells to a percent or two in bfloat16."""
    seen = []
    monkeypatch.setattr(newton_schulz, "whole_runs", lambda _, norm: seen.append(norm) or (1,) * 5)
    ns = newton_schulz.NewtonSchulz(QUINTIC, "medium", "gram")
    generator = torch.Generator().manual_seed(0)
    for shape, first in (((300, 1200), 1.0), ((1000, 256), 1.0), ((256, 320), 8.0)):
        update = torch.randn(shape, generator=generator)
        update[0] *= first
        ns(update)
        x = update.double() / update.double().norm()
        assert seen[-1] == pytest.approx(float((x @ x.mT).norm()), rel=0.03)


def test_ns_method_forces():
    """What the user asks for is not measured."""
    assert choose_method("standard", QUINTIC, 768, 7680, pytest.fail) == "plain"
    assert choose_method("gram", QUINTIC, 768, 768, pytest.fail) == "gram"


def test_a_plan_is_read_as_it_is_written():
    """The string names every shape that was met, and is enough to choose alike."""
    book = MethodBook("auto", QUINTIC, rates=lambda _: DEFAULT)
    book.method_of(768, 3072)
    book.method_of(256, 256)
    assert book.text == "256x256:plain 768x3072:gram"
    again = MethodBook("auto", QUINTIC, book.text, pytest.fail)
    assert again.method_of(768, 3072) == "gram"


UNREADABLE = [
    "gram",
    "768:gram",
    "768x768:fast",
    "768xwide:gram",
    "²x4:gram",
    "9" * 5000 + "x4:gram",
    "768x256:gram",
    "0x0:plain",
    "0x256:gram",
    "1x999999999999999999:gram",
    "256x768:plain 64x64:plain 256x768:gram",
    5,
    None,
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_plan_that_cannot_be_read_is_refused(text):
    """It is named, with what it must read."""
    with pytest.raises(ConfigurationError, match="must read ROWSxCOLUMNS:METHOD"):
        TensorParallelMuon([torch.nn.Parameter(torch.zeros(4, 8))], ns_plan=text)


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_plan_that_cannot_be_read_is_not_loaded(text):
    """A state dict with it is refused before anything is taken, by the class and through the core."""
    params = [torch.nn.Parameter(torch.zeros(4, 8)) for _ in range(2)]
    params[0].grad = torch.ones(4, 8)
    first, second = (
        TensorParallelMuon([param], momentum=mu) for param, mu in zip(params, (0.5, 0.9), strict=True)
    )
    first.step()
    saved = first.state_dict()
    saved["param_groups"][0]["ns_plan"] = text
    with pytest.raises(ConfigurationError, match="must read ROWSxCOLUMNS:METHOD"):
        second.load_state_dict(saved)
    assert not second.state
    assert second.param_groups[0]["momentum"] == 0.9
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    built = build_optimizer(model, "muon", lr=0.1)
    saved = built.state_dict()
    for group in saved["param_groups"]:
        if "ns_plan" in group:
            group["ns_plan"] = text
    with pytest.raises(
        CheckpointMismatchError, match=r"'ns_plan' of group \d+ is .*must read ROWSxCOLUMNS:METHOD"
    ):
        built.load_state_dict(saved)


def test_a_shape_may_be_named_twice_alike() -> None:
    """Nothing is in doubt."""
    assert parsed_plan(" 8x8:plain\n4x8:gram 8x8:plain ") == {(8, 8): "plain", (4, 8): "gram"}


def test_a_plan_that_cannot_run_is_said():
    """Coefficients that do not allow runs take single steps, with a warning."""
    with pytest.warns(UserWarning, match="768x3072 step by step: its coefficients do not allow"):
        book = MethodBook("auto", resolve_coefficients("cans", 5), "768x3072:gram")
    assert book.text == "768x3072:plain"


@pytest.mark.parametrize(
    ("plan", "blocks"), [("", "runs"), ("256x512:plain", "standard"), ("256x512:gram", "runs")]
)
@pytest.mark.usefixtures("by_torch")
def test_float32_has_a_plan(monkeypatch, plan, blocks):
    """Also where the iteration runs in float32: a group says how, and takes what a checkpoint brought."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: False)
    asked = []
    monkeypatch.setattr(
        wide,
        "plan_blocks",
        lambda method, *args, **kw: asked.append(method) or plan_blocks(method, *args, **kw),
    )
    param = torch.nn.Parameter(torch.zeros(256, 512))
    param.grad = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    optimizer = TensorParallelMuon([param], ns_plan=plan)
    optimizer.step()
    assert asked == [blocks]
    assert optimizer.param_groups[0]["ns_plan"] == (plan or "256x512:gram")


def test_a_plan_that_float32_cannot_run_is_said():
    """With the accuracy of float32 asked for, steep coefficients that need not settle go step by step in batches."""
    book = MethodBook("auto", resolve_coefficients("cans", 5), "8x16:gram", narrow=False)
    asked = torch.device("cpu"), torch.float32, Spectrum.UNKNOWN
    with pytest.warns(UserWarning, match="8x16 step by step: its coefficients do not allow"):
        assert book.wide_method_of(8, 16, *asked, relaxed=False) == "standard"
    assert book.text == "8x16:plain"


@pytest.mark.usefixtures("in_bfloat16", "no_file")
@pytest.mark.parametrize("plan", ["256x512:gram", "256x512:plain"])
def test_a_resume_takes_the_plan_of_the_checkpoint(monkeypatch, plan):
    """Whatever would be chosen here; and it gives the same bits."""
    torch.manual_seed(0)
    start, grads = torch.randn(256, 512), torch.randn(3, 256, 512)

    def stepped(optimizer, param, some):
        for grad in some:
            param.grad = grad.clone()
            optimizer.step()

    straight, saved, resumed = (torch.nn.Parameter(start.clone()) for _ in range(3))
    stepped(TensorParallelMuon([straight], ns_plan=plan), straight, grads)
    before = TensorParallelMuon([saved], ns_plan=plan)
    stepped(before, saved, grads[:2])
    after = TensorParallelMuon([resumed])
    resumed.data.copy_(saved)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    monkeypatch.setattr(calibration, "_probed", pytest.fail)
    stepped(after, resumed, grads[2:])
    assert after.param_groups[0]["ns_plan"] == plan
    assert torch.equal(resumed, straight)


@pytest.mark.usefixtures("no_file", "by_torch")
@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("precision_asked", ["medium", "highest"])
@pytest.mark.parametrize(("stored", "forced"), [("gram", "standard"), ("standard", "gram")])
def test_a_forced_method_wins_over_a_stored_plan(
    monkeypatch: pytest.MonkeyPatch, bfloat16: bool, precision_asked: str, stored: str, forced: str
) -> None:
    """A resume iterates as if there were no plan; plan and report say how, and one warning says what has changed."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: bfloat16)
    told = {"standard": "plain", "gram": "gram"}
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(256, 512, generator=generator), torch.randn(2, 256, 512, generator=generator)
    results = []
    saved = torch.nn.Parameter(start.clone())
    before = TensorParallelMuon([saved], ns_method=stored, fp32_matmul_prec=precision_asked)
    saved.grad = grads[0].clone()
    before.step()
    for text in (f"256x512:{told[stored]} 256x768:{told[stored]}", ""):
        param = torch.nn.Parameter(saved.detach().clone())
        param.param_info = ParamInfo("w", Role.MATRIX, MatrixView())  # type: ignore[attr-defined]
        after = TensorParallelMuon([param], ns_method=forced, fp32_matmul_prec=precision_asked)
        state = copy.deepcopy(before.state_dict())
        state["param_groups"][0]["ns_plan"] = text
        after.load_state_dict(state)
        param.grad = grads[1].clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            after.step()
            after.step()
        method = told[forced]
        assert [str(warning.message) for warning in caught] == [
            f"muon_ns_method={forced!r} takes the place of the stored ns_plan: 256x512:{method} 256x768:{method}, not "
            f"{text}"
        ] * bool(text)
        assert "256x512:" + method in after.param_groups[0]["ns_plan"].split()
        assert "256x768:" + told[stored] not in after.param_groups[0]["ns_plan"]
        assert param_notes(after) == {"w": method}
        results.append(param)
    assert torch.equal(*results)


@pytest.mark.usefixtures("in_bfloat16", "no_file")
def test_the_report_of_a_forced_method_is_right_before_the_next_step() -> None:
    """What a load brought is not told of a matrix that will be iterated otherwise."""
    param = torch.nn.Parameter(torch.ones(256, 512))
    param.param_info = ParamInfo("w", Role.MATRIX, MatrixView())  # type: ignore[attr-defined]
    optimizer = TensorParallelMuon([param], ns_method="standard")
    param.grad = torch.ones(256, 512)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["ns_plan"] = "256x512:gram"
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match="takes the place of the stored ns_plan"):
        assert param_notes(optimizer) == {"w": "plain"}


def test_what_is_stored_is_read(file, monkeypatch):
    """The nearest size counts, nothing is measured, and other processors' rates stay in the file."""
    monkeypatch.setattr(calibration, "_probed", pytest.fail)
    monkeypatch.setattr(calibration, "calibrated", lambda: (small, large))
    small, large = (
        Rates(size=size, gram=1e-12, square=1e-12, apply=1e-12, pass_=1e-10) for size in (256, 768)
    )
    file.parent.mkdir()
    file.write_text(json.dumps({"format": 1, "rates": {"another": []}}))
    assert write_calibration() == file
    assert current_rates(200) == small
    assert current_rates(4096) == large
    document = json.loads(file.read_text())
    assert set(document["rates"]) == {
        "another",
        f"{processor_kind()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }


BROKEN = [
    None,
    "no json",
    "[]",
    '{"format": 2, "rates": {}}',
    '{"format": true, "rates": {}}',
    "[" * 200_000,
    *(f'{{"format": 1, "rates": {{"another": {entry}}}}}' for entry in ('""', "{}", "null", "[1]")),
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_named_file_that_cannot_be_read_is_an_error(file, content):
    """Nobody trains for weeks by another plan than he thinks."""
    if content is not None:
        file.parent.mkdir()
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"MEGAOPT_CALIBRATION=.*megaopt calibrate"):
        current_rates(256)


@pytest.mark.parametrize(
    ("rates", "has"),
    [({}, "nor any others"), ({"another, 64 threads": []}, "only for 'another, 64 threads'")],
)
def test_a_named_file_without_rates_of_this_machine_is_said_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[str, Any], has: str
) -> None:
    """With what is missing, and the command that adds it; a file of the cache folder is for several machines."""
    monkeypatch.setattr(calibration, "_probed", lambda _: DEFAULT)
    file.parent.mkdir()
    file.write_text(json.dumps({"format": 1, "rates": rates}))
    threads = torch.get_num_threads()
    key = f"{processor_kind()}, {threads} threads, torch {torch.__version__}"
    with pytest.warns(UserWarning, match="has no rates for") as caught:
        assert current_rates(256) is DEFAULT
    assert current_rates(512) is DEFAULT
    assert [str(warning.message) for warning in caught] == [
        f"MEGAOPT_CALIBRATION={str(file)!r} has no rates for {key!r}, {has}: Muon uses measured or assumed rates; "
        f"`megaopt calibrate --output {file} --threads {threads}` adds them"
    ]


def test_a_cached_file_without_rates_of_this_machine_is_no_matter(
    no_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has named it."""
    monkeypatch.setattr(calibration, "_probed", lambda _: DEFAULT)
    no_file.parent.mkdir()
    no_file.write_text(json.dumps({"format": 1, "rates": {"another": []}}))
    assert current_rates(256) is DEFAULT


def test_a_named_file_that_is_missing_is_said_with_the_command_that_writes_it(file):
    """And not as a file that is broken."""
    with pytest.raises(
        ConfigurationError, match="there is no such file; `megaopt calibrate --output "
    ) as caught:
        current_rates(256)
    assert "Errno" not in str(caught.value)


def test_a_named_calibration_tells_what_steps_cost(file):
    """By the rates of the nearest size, in operations at the rate of the largest; without one, operations count."""

    def cost(rows, columns):
        spec = ParamSpec(
            "w", (rows, columns), torch.float32, torch.float32, "muon", 0, Granularity.TENSOR, 0.0
        )
        return step_cost(spec, MatrixView())

    key = f"{processor_kind()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    slow = Rates(size=128, gram=8e-12, square=8e-12, apply=8e-12, pass_=1e-10)
    fast = Rates(size=1024, gram=1e-12, square=3e-12, apply=2e-12, pass_=1e-10)
    file.parent.mkdir()
    file.write_text(json.dumps({"format": 1, "rates": {key: [asdict(slow), asdict(fast)]}}))
    stored_rates_of.cache_clear()
    assert cost(2048, 1024) == pytest.approx(5 * 2 * (2048 * 1024**2 * 3 + 1024**3 * 3) / 2)
    assert cost(64, 128) == pytest.approx(5 * 2 * (128 * 64**2 * 16 + 64**3 * 8) / 2)
    file.write_text(json.dumps({"format": 1, "rates": {"another": [asdict(slow)]}}))
    stored_rates_of.cache_clear()
    with pytest.warns(UserWarning, match="has no rates for"):
        assert cost(64, 128) == 5 * (4 * 128 * 64**2 + 2 * 64**3)


def test_a_cached_file_that_cannot_be_read_is_said(no_file, monkeypatch):
    """It is not what the user asked for: a warning, and the rates are measured."""
    monkeypatch.setattr(calibration, "_probed", lambda _: DEFAULT)
    no_file.parent.mkdir()
    no_file.write_text("{")
    with pytest.warns(UserWarning, match="does not use the calibration"):
        assert current_rates(256) is DEFAULT


def test_a_cache_folder_that_may_not_be_entered_is_said(no_file, monkeypatch):
    """As one whose file is broken: the home of another user."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(no_file))

    monkeypatch.setattr(calibration, "_probed", lambda _: DEFAULT)
    monkeypatch.setattr(Path, "exists", refused)
    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.warns(UserWarning, match="does not use the calibration .*Permission denied"):
        assert current_rates(256) is DEFAULT


@pytest.mark.usefixtures("no_file")
def test_a_user_without_a_home_has_no_calibration(monkeypatch):
    """Rates are measured; what would write a file says what to name."""

    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(calibration, "_probed", lambda _: DEFAULT)
    assert current_rates(256) is DEFAULT
    with pytest.raises(ConfigurationError, match=r"MEGAOPT_CALIBRATION names no file.*XDG_CACHE_HOME"):
        write_calibration()


def test_what_others_write_during_a_measurement_stays(file, monkeypatch):
    """Two processes with other numbers of threads calibrate at once: both are in the file."""

    def measured() -> tuple[Rates, ...]:
        file.parent.mkdir()
        file.write_text(json.dumps({"format": 1, "rates": {"another": []}}))
        return (DEFAULT,)

    monkeypatch.setattr(calibration, "calibrated", measured)
    write_calibration()
    assert "another" in json.loads(file.read_text())["rates"]


@pytest.mark.usefixtures("no_file")
def test_deterministic_runs_and_ranks_measure_nothing(monkeypatch):
    """Two runs, and two ranks, choose alike."""
    monkeypatch.setattr(calibration, "_probed", pytest.fail)
    with monkeypatch.context() as deterministic:
        deterministic.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert current_rates(256) is DEFAULT
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert current_rates(256) is DEFAULT


def test_a_calibration_ends_where_products_take_seconds(monkeypatch):
    """A processor that cannot multiply bfloat16 is measured once by each size, not fifty times."""
    clock, products = iter(range(10_000)), []
    monkeypatch.setattr(rates_module.time, "perf_counter", lambda: float(next(clock)))
    for name in ("mm", "outer", "commuting"):
        holder = rates_module.torch if name == "mm" else rates_module
        monkeypatch.setattr(holder, name, lambda x, *_, **__: products.append(len(x)))
    found = calibrated()
    assert [each.size for each in found] == [256, 768]
    assert [products.count(size) for size in (256, 768)] == [3, 3]


def test_a_probe_gives_rates():
    """Each of them is a time."""
    found = probe()
    assert all(0 < getattr(found, name) < 1e-3 for name in ("gram", "square", "apply", "pass_"))


def test_the_command_writes_the_file(file, monkeypatch, capsys):
    """`megaopt calibrate` measures, writes, and names the file."""
    monkeypatch.setattr(calibration, "calibrated", lambda: (DEFAULT,))
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert current_rates(64) == DEFAULT
    assert main(["calibrate", "--threads", "0"]) == 2
    assert "--threads 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "fast", None, 10**400])
def test_rates_are_checked(value):
    """A rate is a number above 0."""
    with pytest.raises(ConfigurationError, match=r"square=.*: must be a number above 0"):
        Rates(size=256, gram=1e-12, square=value, apply=1e-12, pass_=1e-10)
