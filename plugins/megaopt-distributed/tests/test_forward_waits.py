"""No module reads a parameter before its bucket is gathered, however the model is written and called."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from megaopt_distributed.buffers.communicator import Pending
from torch import nn
from torch.nn.functional import linear

from megaopt_core.errors import UnsupportedOperationError

pytestmark = pytest.mark.any_python

OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1}


class Twins(nn.Module):
    """The layer that is registered later, and runs first, shares the memory of the other's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8, bias=False)
        self.first = nn.Linear(8, 8, bias=False)
        self.first.weight = nn.Parameter(self.last.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Reads(nn.Module):
    """Reads the weight of a layer that is called only later."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(linear(x, self.decoder.weight.data.t()))))


class Nested(nn.Module):
    """The reading is done by a module that does not own what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.layer = nn.Module(), nn.Linear(8, 8)
        self.reader.forward = lambda x: linear(x, self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.reader(x))


class Hooked(nn.Module):
    """A hook, there before the model was wrapped, computes with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.register_forward_pre_hook(lambda module, given: (given[0] * module.bias,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Listed(nn.Module):
    """Parameters in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gains = nn.ParameterList([torch.ones(8), torch.ones(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.gains[0]) * self.gains[1]


class Merges(nn.Module):
    """In evaluation reads a weight at once that training only reads by calling its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if self.training else linear(x, self.layers[1].weight @ self.layers[0].weight)


def wrapped(build: Callable[[], nn.Module]) -> DistributedDataParallel:
    """Return a model whose parameters lie in one bucket each."""
    torch.manual_seed(0)
    return DistributedDataParallel(build(), DistributedDataParallelConfig(**OVERLAP))


def gather_late(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Put nonsense into every bucket until somebody waits for it; return the parameters as they should be."""
    right = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    for bucket in model.buckets:
        data = bucket.param_data.clone()
        bucket.param_data.fill_(float("nan"))
        bucket._gather = Pending(
            "a gather", done=lambda bucket=bucket, data=data: bucket.param_data.copy_(data)
        )
    return right


X = torch.linspace(-1, 1, 32).view(2, 2, 8)


@pytest.mark.parametrize("build", [Twins, Reads, Nested, Hooked, Listed])
@pytest.mark.parametrize("trains", [True, False])
def test_what_a_forward_pass_reads_was_waited_for(build, trains: bool) -> None:
    """In the first pass, in the second, and in the second that is not the first of its kind."""
    model = wrapped(build).train(trains)
    with torch.set_grad_enabled(trains):
        expected = model(X)
        for _ in range(2):
            gather_late(model)
            assert torch.equal(model(X), expected)


def test_evaluation_is_learned_by_itself() -> None:
    """Right after training, and from then on."""
    model = wrapped(Merges)
    for _ in range(2):
        model(X)
    model.eval()
    expected = model.module(X)
    for _ in range(2):
        gather_late(model)
        assert torch.equal(model(X), expected)


def test_a_module_that_is_called_directly_waits_for_everything() -> None:
    """Nothing was learned about a way that does not lead through the wrapper."""
    model = wrapped(Reads)
    expected = model(X)
    model(X)
    gather_late(model)
    assert torch.equal(model.module(X), expected)


def test_modules_wait_for_no_more_than_they_read() -> None:
    """What is gathered last does not hold back the layer that runs first."""
    model = wrapped(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model(X)
    pending: list[list[bool]] = []
    model.module[1].register_forward_pre_hook(
        lambda *_: pending.append([bucket.is_gathering for bucket in model.buckets]), prepend=True
    )
    gather_late(model)
    model(X)
    assert pending == [[True, True, False, False]]


def test_a_failed_first_pass_teaches_nothing() -> None:
    """What was read before the error is not all that is read."""
    model = wrapped(Reads)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 3))
    expected = model(X)
    gather_late(model)
    assert torch.equal(model(X), expected)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, at graph breaks
@pytest.mark.filterwarnings("ignore:.*3\\.13\\.0")  # torch remarks that its guards are slower on that Python
@pytest.mark.parametrize("where", ["inside", "outside", "in place"])
def test_compiled_models_wait_too(where: str) -> None:
    """A compiled module waits for all below it; hooks are not traced."""
    torch._dynamo.reset()
    model = wrapped(Reads if where != "inside" else lambda: torch.compile(Reads(), backend="eager"))
    if where == "in place":
        model.module.compile(backend="eager")
    run = torch.compile(model, backend="eager") if where == "outside" else model
    expected = run(X)
    for _ in range(3):
        gather_late(model)
        assert torch.equal(run(X), expected)


@pytest.mark.filterwarnings("ignore:.*3\\.13\\.0")  # as above
def test_a_compiled_module_stays_one_graph() -> None:
    """Waiting puts no break into it."""
    torch._dynamo.reset()
    model = wrapped(lambda: torch.compile(Reads(), backend="aot_eager", fullgraph=True))
    expected = model(X)
    gather_late(model)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("part", ["module", "layer"])
def test_state_dicts_of_the_bare_module_are_complete(part: str) -> None:
    """Of the whole, and of a module inside."""
    model = wrapped(Reads)
    right = gather_late(model)
    prefix, module = ("", model.module) if part == "module" else ("encoder.", model.module.encoder)
    for name, value in module.state_dict().items():
        assert torch.equal(value, right[prefix + name])


def test_what_is_loaded_is_not_overwritten_by_a_late_gather() -> None:
    """Loading into the bare module waits first."""
    model = wrapped(Reads)
    state = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    gather_late(model)
    model.module.load_state_dict(state)
    model.finish_param_sync()
    assert all(bool((param == 2.0).all()) for param in model.module.parameters())


def test_copies_of_the_module_are_independent() -> None:
    """Copies and averages work, and wait for nothing; while parameters are gathered they are refused."""
    model = wrapped(Reads)
    expected = model(X)
    copies = [copy.deepcopy(model.module), torch.optim.swa_utils.AveragedModel(model.module).module]
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    gather_late(model)
    for copied in copies:
        assert torch.equal(copied(X), expected)
        assert copied.state_dict().keys() == model.module.state_dict().keys()
    gather_late(model)
    with pytest.raises(UnsupportedOperationError, match=r"finish_param_sync\(\)"):
        copy.deepcopy(model.module)
