"""`megaopt explain` tells what each parameter would get, from a factory and a file, and builds nothing."""

import json
import re
from pathlib import Path

import pytest
from megaopt_testing.fake_plugins import FakePlugins
from megaopt_tools import main

from megaopt_core.config import parse_assignments

PLUGIN = """
@frozen
class Settings:
    beta: float = 0.5

def matrices_only(spec, view):
    return None if view is not None else "no matrix"

@hookimpl
def megaopt_optimizer_entries():
    return {
        "plain": OptimizerEntry(torch.optim.SGD, description="plain"),
        "matrix": OptimizerEntry(
            torch.optim.SGD, settings=Settings, setting_prefixes=("matrix",), accepts=matrices_only, fallback="plain"
        ),
    }
"""

MODELS = """
import torch

class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(),
                         torch.nn.Linear(8, 3))
        self[0].bias.requires_grad_(False)
        self[2].weight.matrix_view = "matrix"
        assert self[0].weight.is_meta, "made on " + str(self[0].weight.device)

class Namespace:
    model = Model

class Sized(torch.nn.Linear):
    def __init__(self, width, *, depth, bias=True):
        super().__init__(width, depth)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(64, 4)
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)
        torch.nn.init.trunc_normal_(self.up.weight)
        for weight in (self.up.weight, self.down.weight):
            weight.matrix_view = "matrix"

class Drawn(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = torch.nn.Parameter(torch.randn(4, 2))
        self.shift = torch.nn.Parameter(torch.rand((4,), dtype=torch.float32))

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = torch.nn.ModuleDict(
            {"wte": torch.nn.Embedding(500, 64), "h": torch.nn.ModuleList(Block() for _ in range(12)),
             "ln_f": torch.nn.LayerNorm(64)}
        )

def chunks():
    return [torch.nn.Linear(2, 2)]

def no_model():
    return 3

def frozen():
    return torch.nn.Linear(2, 2).requires_grad_(False)

def long_names():
    return torch.nn.ModuleDict(
        {"an_exceedingly_long_name_of_a_projection_of_hidden_states_into_another_space": torch.nn.Linear(2, 2)}
    )

def needs_values():
    return torch.nn.Linear(2, int(torch.ones(()).item()))

def quit():
    raise SystemExit('no data')


def chatty():
    print("made by hand")
    return torch.nn.Linear(2, 2)


number = 5
"""


@pytest.fixture
def folder(plugins: FakePlugins, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with models, and a plugin."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(plugins.folder)
    plugins.install("two", PLUGIN)
    plugins.registry()
    (plugins.folder / "explained_models.py").write_text(MODELS)
    (plugins.folder / "script.py").write_text("raise SystemExit(2)\n")
    return plugins.folder


@pytest.mark.usefixtures("folder")
def test_every_parameter_with_its_optimizer_and_reason(capsys) -> None:
    """A model on the meta device is enough."""
    assert main(["explain", "explained_models:Model", "--optimizer", "matrix", "--set", "lr=0.1"]) == 0
    printed = capsys.readouterr().out
    summary, _, table = printed.partition("\n\nparameter ")
    assert summary.startswith("5 parameters, 131 elements\n")
    assert summary.endswith("\n\n1 parameter does not train: 0.bias")
    (header, _, *rows) = f"parameter {table}".splitlines()
    columns = {"parameter", "optimizer", "plugin", "group", "lr", "wd", "why"}
    assert columns <= set(header.split())
    lines = {line.split()[0]: line for line in rows if line}
    assert re.search(r" 8x8 .* matrix .* megaopt-two .* 0 +0\.1 +0\.01 ", lines["2.weight"])
    assert re.search(r" plain +megaopt-two ", lines["2.bias"])
    assert "no matrix" in printed


@pytest.mark.usefixtures("folder")
def test_json(capsys) -> None:
    """The configuration, the parameters, what does not train."""
    assert main(["explain", "explained_models.py:Namespace.model", "--optimizer", "matrix", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["config"]["optimizer"] == "matrix"
    assert explained["frozen"] == ["0.bias"]
    row = next(row for row in explained["parameters"] if row["name"] == "2.weight")
    assert row["plugin"] == "megaopt-two 1.0"
    assert (row["shape"], row["elements"], row["lr"], row["weight_decay"]) == ([8, 8], 64, 0.001, 0.01)
    assert row["lr_is_default"]


def test_a_run_file_with_overrides(folder, capsys) -> None:
    """Options win over the file."""
    (folder / "run.toml").write_text(
        'optimizer = "plain"\nlr = 0.1\nmatrix_beta = 0.3\n\n[[overrides]]\nname = "4.weight"\nlr = 0.5\n'
    )
    assert (
        main(["explain", "explained_models:Model", "--config", "run.toml", "--set", "lr=0.2", "--json"]) == 0
    )
    explained = json.loads(capsys.readouterr().out)
    rates = {row["name"]: row["lr"] for row in explained["parameters"]}
    assert (rates["2.weight"], rates["4.weight"]) == (0.2, 0.5)
    assert explained["config"]["matrix_beta"] == 0.3


@pytest.mark.usefixtures("folder")
def test_chunks(capsys) -> None:
    """A factory may return a list."""
    assert main(["explain", "explained_models:chunks", "--optimizer", "plain"]) == 0
    assert "weight" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("explained_models", "'explained_models': write it as module:factory or file.py:factory"),
        ("explained_models:none", "'explained_models:none': explained_models has no 'none'"),
        (
            "no_such_module:f",
            "'no_such_module:f': no_such_module cannot be imported "
            "(ModuleNotFoundError: No module named 'no_such_module')",
        ),
        (
            "script:Model",
            "'script:Model': script runs as a script when it is imported, and exits; put what trains under "
            '`if __name__ == "__main__":`',
        ),
        (
            "explained_models:Sized",
            "'explained_models:Sized' needs arguments (width, depth), and is called without any; name a function that "
            "takes none, such as `def build(): return Sized(width=..., depth=...)`",
        ),
        ("explained_models:number", "'explained_models:number' is not callable: 5"),
        (
            "explained_models:quit",
            "'explained_models:quit' failed on device meta (SystemExit: no data); with --device cpu it may work",
        ),
        (
            "explained_models:no_model",
            "'explained_models:no_model' returned int; it must return a torch.nn.Module or a list of them",
        ),
    ],
)
def test_a_wrong_factory_is_explained(capsys, target, message) -> None:
    """In one line, with exit status 2."""
    assert main(["explain", target, "--optimizer", "plain"]) == 2
    assert capsys.readouterr().err == f"megaopt: error: {message}\n"


@pytest.mark.usefixtures("folder")
def test_a_factory_that_needs_values_may_run_on_another_device(capsys) -> None:
    """The meta device is the default, not the only one."""
    assert main(["explain", "explained_models:needs_values", "--optimizer", "plain"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megaopt: error: 'explained_models:needs_values' failed on device meta (")
    assert error.endswith("; with --device cpu it may work\n")
    assert main(["explain", "explained_models:needs_values", "--optimizer", "plain", "--device", "cpu"]) == 0


def test_assignments_are_read_as_what_they_look_like(capsys, plugins) -> None:
    """Numbers, switches, lists, and strings without quotes."""
    read = parse_assignments(
        ["a=1e-3", "b=true", "c=False", "d=None", "e=adam", "f=[1, 2]", 'g="7"', "h=x=y"]
    )
    assert read == {
        "a": 1e-3,
        "b": True,
        "c": False,
        "d": None,
        "e": "adam",
        "f": [1, 2],
        "g": "7",
        "h": "x=y",
    }
    plugins.registry()
    assert main(["explain", "torch.nn:Identity", "--set", "lr"]) == 2
    assert capsys.readouterr().err == "megaopt: error: --set lr: write it as NAME=VALUE\n"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_a_deep_model_fits_the_terminal(monkeypatch, capsys, columns) -> None:
    """Repeated layers share a row; names are broken after dots alone; what many rows have in common stands once."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["explain", "explained_models:Deep", "--optimizer", "matrix", "--lr", "3e-4"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) <= (50 if columns == 60 else 40)
    assert lines[0].startswith("123 parameters, ")
    assert lines[2].split()[:4] == ["optimizer", "parameters", "elements", "lr"]
    header = next(line for line in lines if line.startswith("parameter "))
    if columns < 140:
        assert header.split() == ["parameter", "shape", "optimizer", "lr", "why"]
    start = lines.index(header) + 2
    size = len(lines[start - 1].split()[0])
    first = [line[:size].strip() for line in lines[start : lines.index("", start)]]
    names = "".join(part if part.endswith(".") else f"{part} " for part in first).split()
    assert names == [
        "transformer.wte.weight",
        "transformer.h.*.attention.in_proj_weight",
        "transformer.h.*.attention.in_proj_bias",
        "transformer.h.*.attention.out_proj.weight",
        "transformer.h.*.attention.out_proj.bias",
        "transformer.h.*.norm.weight",
        "transformer.h.*.norm.bias",
        "transformer.h.*.up.weight",
        "transformer.h.*.up.bias",
        "transformer.h.*.down.weight",
        "transformer.h.*.down.bias",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    assert len([line for line in lines if line.startswith("[1] ")]) == 1


@pytest.mark.usefixtures("folder")
def test_in_a_pipe_a_row_is_a_line(monkeypatch, capsys) -> None:
    """With every column; `--all` does not fold."""
    monkeypatch.delenv("COLUMNS")
    for option, count in (([], 13), (["--all"], 123)):
        assert main(["explain", "explained_models:Deep", "--optimizer", "matrix", *option]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if line.startswith("transformer.")]) == count
        row = next(line for line in lines if line.startswith("transformer.h.") and "up.weight" in line)
        assert re.search(r" 256x64 +matrix .* megaopt-two .* 1e-3 \(default\) ", row)


@pytest.mark.usefixtures("folder")
def test_the_learning_rate_says_whose_it_is(capsys) -> None:
    """Given by `--lr`, or the class's own."""
    assert main(["explain", "explained_models:chunks", "--optimizer", "plain"]) == 0
    assert "1e-3 (default)" in capsys.readouterr().out
    assert main(["explain", "explained_models:chunks", "--optimizer", "plain", "--lr", "2e-5"]) == 0
    printed = capsys.readouterr().out
    assert "2e-5" in printed
    assert "default" not in printed


@pytest.mark.any_python
@pytest.mark.parametrize("model", ["Deep", "Drawn"])
def test_explaining_imports_no_compiler(model, folder, plugins) -> None:
    """Random numbers on the meta device would, for seconds."""
    done = plugins.python(f"""
        import sys
        from megaopt_tools import main
        status = main(["explain", "explained_models:{model}", "--optimizer", "plain"])
        assert not {{"torch._dynamo", "sympy"}} & set(sys.modules)
        sys.exit(status)
        """)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("factory", "frozen"), [("torch.nn:Identity", ""), ("explained_models:frozen", "2 parameters do not")]
)
def test_a_model_without_anything_to_train(capsys, factory, frozen) -> None:
    """Is said in a sentence; there is no table."""
    assert main(["explain", factory, "--optimizer", "plain"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0 parameters, 0 elements\n\nno parameter trains: there is nothing to step\n")
    assert frozen in printed
    assert "---" not in printed


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("columns", [60, 80])
def test_names_longer_than_a_line_break_between_their_words(capsys, monkeypatch, columns) -> None:
    """After a dot where that is enough, else after an underscore."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["explain", "explained_models:long_names", "--optimizer", "plain"]) == 0
    _, _, table = capsys.readouterr().out.partition("\n\nparameter ")
    assert max(map(len, table.splitlines())) <= columns
    parts = [line.split()[0] for line in table.split("\n\n")[0].splitlines()[2:]]
    assert all(part.endswith(("_", ".", ".weight", ".bias")) for part in parts)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "optimizer=matrix"), "--set optimizer=matrix: the optimizer is already plain"),
        (("--lr", "0.1", "--set", "lr=0.2"), "--set lr=0.2: the learning rate is already 0.1"),
        (
            ("--set", "min_lr=5"),
            "min_lr=5: must not be above lr=0.001, the default of plain",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(capsys, options, message) -> None:
    """As `megaopt train` refuses them, in one line."""
    assert main(["explain", "explained_models:chunks", "--optimizer", "plain", *options]) == 2
    assert capsys.readouterr() == ("", f"megaopt: error: {message}\n")


@pytest.mark.usefixtures("folder")
def test_settings_that_would_change_nothing_are_told(capsys) -> None:
    """On standard error, so that JSON stays JSON."""
    options = ["--optimizer", "plain", "--set", "bf16=true", "--set", "matrix_beta=0.1", "--json"]
    assert main(["explain", "explained_models:chunks", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["config"]["bf16"] is True
    assert err == (
        "megaopt: warning: settings that change nothing here: bf16=True: the model's parameters are float32; cast the "
        "model before the build; matrix_beta=0.1: no optimizer in use reads it (plain)\n"
    )


@pytest.mark.usefixtures("folder")
def test_what_a_factory_prints_is_no_part_of_the_json(capsys) -> None:
    """It goes to standard error."""
    assert main(["explain", "explained_models:chatty", "--optimizer", "plain", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["parameters"]) == 2
    assert err == "made by hand\n"


BATCHES = """
import torch
ids = torch.zeros(2, 4)
def batch():
    return {"input": torch.ones(2, 4)}
def nothing():
    return None
"""


READER = """
from megaopt_core.params import Role

@hookimpl
def megaopt_annotate_params(model_chunk, example):
    values = example["input"] if isinstance(example, dict) else example
    return {"4.weight": Role.OUTPUT} if values is not None and not values.is_meta else {}
"""


@pytest.fixture
def batches(plugins: FakePlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with models and batches, and with a plugin that reads models by an example."""
    monkeypatch.chdir(plugins.folder)
    plugins.install("two", PLUGIN)
    plugins.install("reader", READER)
    plugins.registry()
    (plugins.folder / "explained_batches.py").write_text(MODELS + BATCHES)


@pytest.mark.parametrize("example", ["ids", "batch"])
def test_an_example_is_handed_to_readers(example: str, batches: None, capsys) -> None:
    """A batch that a module has, or makes, reaches what reads models, with values on the CPU."""
    told = []
    for given in ([], ["--example", f"explained_batches:{example}"]):
        assert main(["explain", "explained_batches:Model", "--optimizer", "matrix", "--json", *given]) == 0
        rows = json.loads(capsys.readouterr().out)["parameters"]
        told.append(next(row["role"] for row in rows if row["name"] == "4.weight"))
    assert told[1] == "output" != told[0]


def test_no_batch_is_an_error(batches: None, capsys) -> None:
    """What makes something else than a batch is refused in words."""
    given = ["--optimizer", "plain", "--example", "explained_batches:nothing"]
    assert main(["explain", "explained_batches:Model", *given]) != 0
    assert "returned NoneType; it must return a tensor, a tuple of arguments" in capsys.readouterr().err
