"""Canonical names see through every wrapper, and only through wrappers."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megaopt_core.params import named_modules, named_params, unwrap


class Net(nn.Module):
    """A model with a child that is really called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.module = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight


class OwnWrapper(nn.Module):
    megaopt_wrapper = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(nn.Module):
    """Registers children as torch's class of the same name does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

NAMES = [
    "tokens.weight",
    "module.weight",
    "module.bias",
    "layers.0.weight",
    "layers.0.bias",
    "layers.1.weight",
    "layers.1.bias",
]


def names(model: nn.Module) -> list[str]:
    """Return the canonical names."""
    return [entry.name for entry in named_params(model)]


def test_bare_model_keeps_torch_names():
    """Names and order are those of `named_parameters`."""
    model = Net()
    assert names(model) == NAMES == [name for name, _ in model.named_parameters()]


def test_wrappers_leave_no_trace():
    """Data parallel, our own wrapper, FSDP and compiled models all name parameters alike."""
    for wrap in (nn.DataParallel, OwnWrapper, FullyShardedDataParallel, torch.compile, checkpoint_wrapper):
        assert names(wrap(Net())) == NAMES, wrap


def test_wrappers_stack():
    """Wrappers inside of wrappers are seen through."""
    model = OwnWrapper(nn.DataParallel(torch.compile(Net())))
    assert names(model) == NAMES
    assert isinstance(unwrap(model), Net)


def test_wrappers_inside_the_model():
    """A compiled or checkpointed layer keeps the layer's name."""
    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1])
    model.module = FullyShardedDataParallel(model.module)
    assert names(model) == NAMES


def test_distributed_data_parallel():
    """Torch's DistributedDataParallel is seen through."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert names(nn.parallel.DistributedDataParallel(Net())) == NAMES
    finally:
        dist.destroy_process_group()


def test_a_child_called_module_keeps_its_name():
    """Only wrappers lose a level, not whatever is called `module`."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    assert names(Holder()) == [f"module.{name}" for name in NAMES]


def test_tied_parameters_are_one_entry():
    """A tied parameter is listed once, with its other names and all of its owners."""
    model = Net()
    first = named_params(model)[0]
    assert first.aliases == ("head.weight",)
    assert first.owners == (("tokens", model.tokens, "weight"), ("head", model.head, "weight"))
    assert first.twins == ()


def test_shared_module_gives_aliases():
    """A module that is registered twice gives its parameters both names."""
    layer = nn.Linear(2, 2, bias=False)
    (entry,) = named_params(nn.Sequential(layer, nn.ReLU(), layer))
    assert (entry.name, entry.aliases) == ("0.weight", ("2.weight",))


def test_shared_memory_is_tied():
    """Two parameter objects over one memory are one entry, and the other object is kept."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    (entry,) = named_params(model)
    assert entry.aliases == ("1.weight",)
    assert len(entry.twins) == 1
    assert entry.twins[0] is model[1].weight


def test_parts_of_one_buffer_are_not_tied():
    """Parameters that are views of different parts of one memory stay apart."""
    flat = torch.zeros(18)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for i in range(2):
        model[i].weight.data = flat[9 * i : 9 * (i + 1)].view(3, 3)
    assert [entry.aliases for entry in named_params(model)] == [(), ()]


def test_meta_device():
    """On the meta device ties are found, and separate parameters are not tied."""
    with torch.device("meta"):
        model = Net()
    assert names(model) == NAMES
    assert named_params(model)[0].aliases == ("head.weight",)


def test_frozen_parameters_are_listed():
    """Freezing changes nothing about names."""
    assert names(Net().requires_grad_(requires_grad=False)) == NAMES


def test_parametrizations_keep_torch_names():
    """Parametrized parameters are called what torch calls them."""
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert names(model) == [name for name, _ in model.named_parameters()]


def test_a_module_that_holds_its_parent():
    """A child that holds its own parent ends the walk instead of repeating it."""
    model = Net()
    model.layers[0].parent = model
    assert names(model) == NAMES


def test_named_modules_counts_the_wrapper_and_what_it_wraps():
    """A wrapper and what it wraps share a name."""
    model = nn.DataParallel(nn.Linear(1, 1))
    assert [(name, type(module).__name__) for name, module in named_modules(model)] == [
        ("", "DataParallel"),
        ("", "Linear"),
    ]
