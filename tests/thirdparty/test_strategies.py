"""Strategies that know the documentation alone train as one process does, and share checkpoints with all others."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from long_runs import sometimes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/megaopt-checkpoint/tests"))

from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from megaopt_testing import temporary_plugin
from strategy_models import SETTINGS, Model, gathered, make, train, two_by, use, values_of
from training import logical_state, same

from megaopt_core import build_optimizer
from megaopt_core.errors import MegaoptError
from megaopt_core.params import Shard
from megaopt_core.sharding import LiveModel

pytest.importorskip("megaopt_adam")
pytest.importorskip("megaopt_distributed")
pytest.importorskip("megaopt_muon")
pytestmark = pytest.mark.distributed

OURS = ("round_robin", "row_blocks", "by_expert", "pairs")
ALL = (*OURS, "replicated", "distributed")


def state_of(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return the whole logical state, on every rank."""
    return gathered(logical_state(optimizer))


def cases_of(strategy: str) -> list[str]:
    """Return what a strategy can shard."""
    if strategy == "parts":
        return ["normed_sgd"]
    if strategy == "distributed":
        return [case for case in SETTINGS if "muon" not in case]
    return [*SETTINGS, "normed_sgd"] if strategy == "replicated" else list(SETTINGS)


def train_each(
    rank: int, size: int, installed: str, strategies: Iterable[str], folder: str | None = None
) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Train every case under every strategy; keep one checkpoint of each."""
    use(installed)
    found = {}
    for strategy in strategies:
        for case in cases_of(strategy):
            model, optimizer = make(strategy, case)
            norms = train(model, optimizer, range(3))
            found[strategy, case] = values_of(model), state_of(optimizer), norms
            if folder and case == "bf16 adam":
                save_checkpoint(f"{folder}/{strategy}-{size}", model, optimizer)
    return found


@pytest.fixture(scope="module")
def alone(launch: Callable[..., list[Any]], strategies: str) -> dict[tuple[str, str], tuple[Any, ...]]:
    """What one process trains, with the state that it ends with."""
    return launch(train_each, 1, strategies, ("replicated", *OURS, "parts"))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints of all strategies lie, from 2 ranks and from 4."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def by_two(
    launch: Callable[..., list[Any]], strategies: str, folder: Path
) -> list[dict[tuple[str, str], tuple[Any, ...]]]:
    """What 2 ranks train."""
    return launch(train_each, 2, strategies, (*ALL, "parts"), str(folder))


@pytest.fixture(scope="module")
def by_four(
    launch: Callable[..., list[Any]], strategies: str, folder: Path
) -> list[dict[tuple[str, str], tuple[Any, ...]]]:
    """What 4 ranks train."""
    return launch(train_each, 4, strategies, (*ALL, "parts"), str(folder))


def is_exact(strategy: str, case: str) -> bool:
    """Return whether nothing may round otherwise: no norm clips, and no matrices are batched otherwise."""
    return not case.startswith("clipped") and not (strategy == "by_expert" and case == "muon")


def compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, exact: bool) -> None:
    """Compare mappings of tensors, bit for bit or to 1e-6."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rtol, atol = (0, 0) if exact else (1e-6, 1e-6)
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ranks", sometimes(["alone", "by_two", "by_four"], ["alone", "by_four"]))
def test_ranks_together_train_as_one_process(request, alone, ranks):
    """Parameters and states of every optimizer are equal: bit for bit, to 1e-6 where a norm clips."""
    trained = request.getfixturevalue(ranks)
    for results in [trained] if ranks == "alone" else trained:
        for (strategy, case), (values, state, norms) in results.items():
            expected = alone["replicated", case]
            exact = is_exact(strategy, case) and case != "normed_sgd"
            compare(values, expected[0], exact=exact)
            compare(state, expected[1], exact=exact)
            assert norms == (pytest.approx(expected[2], rel=1e-6) if "clipped" in case else expected[2])


def tensor_parallel(rank: int, size: int, installed: str, folder: str) -> dict[str, list[float]]:
    """Train every strategy on a model that two tensor-parallel ranks cut, and keep checkpoints."""
    use(installed)
    groups, norms = two_by(size), {}
    for strategy in ("replicated", *OURS):
        model, optimizer = make(strategy, groups=groups)
        norms[strategy] = train(model, optimizer, range(3), groups)
        save_checkpoint(f"{folder}/{strategy}-tp{size}", model, optimizer)
    return norms


def hop(
    rank: int, size: int, installed: str, folder: str, sources: Iterable[str], cut: bool, every: int
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Load every checkpoint under strategies, in turn one of so many; return what was loaded, and what differed."""
    use(installed)
    groups = two_by(size) if cut else None
    loaded, wrong = {}, []
    for number, source in enumerate(sources):
        for strategy in ALL[number % every :: every]:
            model, optimizer = make(strategy, seed=1 + rank, groups=groups)
            load_checkpoint(f"{folder}/{source}", model, optimizer)
            found = state_of(optimizer)
            train(model, optimizer, range(3, 5), groups)
            result = found, {} if cut else values_of(model)
            expected = loaded.setdefault(source, result)
            if not (same(found, expected[0]) and same(result[1], expected[1])):
                wrong.append((source, strategy))
    return loaded, wrong


@pytest.mark.parametrize("every", sometimes([1, 3], [3]))
def test_checkpoints_go_from_any_strategy_to_any_other(
    alone, by_two, by_four, launch, strategies, folder, every
):
    """From 2 ranks and 4, tensor parallel or not, to 2 ranks and to 2 x 2: state bit for bit, and the steps after."""
    launch(tensor_parallel, 4, strategies, str(folder))
    whole = [f"{strategy}-{size}" for strategy in ALL for size in (2, 4)]
    cut = [f"{strategy}-tp4" for strategy in ("replicated", *OURS)]
    # What two ranks step is stored by one of them.
    once = read_manifest(folder / "round_robin-2").nbytes
    assert [read_manifest(folder / f"pairs-{size}").nbytes for size in (2, 4)] == [once, once]
    state = alone["replicated", "bf16 adam"][1]
    for size, sources, is_cut in (
        (2, [*whole[1::2], *cut[::2]], False),
        (4, [*whole[::2], *cut[1::2]], True),
    ):
        for loaded, wrong in launch(hop, size, strategies, str(folder), sources, is_cut, every):
            assert wrong == []
            for source, (found, _) in loaded.items():
                compare(found, state, exact=source in whole)


def reloaded(rank: int, size: int, installed: str) -> dict[str, bool]:
    """Change the model behind the optimizer's back; return whether a step of rate 0 keeps the change."""
    use(installed)
    found = {}
    for strategy in OURS:
        model, optimizer = make(strategy, lr=0.0)
        train(model, optimizer, range(1))
        other = {name: value + 0.5 for name, value in values_of(model).items()}
        model.load_state_dict({**other, "head.weight": other["embedding.weight"]})
        optimizer.reload_model_params()
        train(model, optimizer, range(1, 3))
        found[strategy] = same(values_of(model), other)
    return found


def through_dcp(rank: int, size: int, installed: str, folder: str) -> dict[str, bool]:
    """Save with torch's own functions under each strategy, load under the next; return whether all is the same."""
    use(installed)
    found = {}
    for source, target in zip(OURS, (*OURS[1:], OURS[0]), strict=True):
        model, optimizer = make(source)
        train(model, optimizer, range(2))
        dcp.save({"model": model, "optim": optimizer.checkpoint_state()}, checkpoint_id=f"{folder}/{source}")
        again, its_optimizer = make(target, seed=1)
        state = {"model": again, "optim": its_optimizer.checkpoint_state()}
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        found[source] = same(state_of(optimizer), state_of(its_optimizer)) and same(
            values_of(model), values_of(again)
        )
    return found


def under_ddp(rank: int, size: int, installed: str) -> dict[str, Any]:
    """Train with gradients that torch's DDP has reduced, each rank on tokens of its own; then tiny models."""
    use(installed)
    found = {}
    for strategy in ("replicated", *OURS):
        torch.manual_seed(0)
        bare = Model()
        model = TorchDDP(bare)
        optimizer = build_optimizer(model, "adam", lr=1e-2, clip_grad=0.1, sharding=strategy)
        norms = []
        for step in range(3):
            tokens = torch.randint(0, 31, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        found[strategy] = values_of(bare), norms
        # All ranks but the first have nothing to step.
        tiny = torch.nn.Linear(3, 1, bias=False)
        tiny.weight.data.fill_(1.0)
        optimizer = build_optimizer(tiny, "adam", lr=1e-2, clip_grad=1.0, sharding=strategy)
        tiny.weight.grad = torch.tensor([[3.0, 4.0, 0.0]])
        norm = optimizer.step().grad_norm
        found[f"tiny {strategy}"] = values_of(tiny), [norm]
    return found


def partial_gradient(rank: int, size: int) -> list[float]:
    """Ask for the gradient of a DTensor of which every rank has a summand."""
    mesh = init_device_mesh("cpu", (size,))
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.full((3, 4), float(rank + 1)), mesh, [Partial()])
    model = LiveModel([], {"w": param})
    return model.grad(Shard("w", (3, 4), ((1, 0), (1, 4)), 0, 4)).tolist()


def of_the_guide(rank: int, size: int) -> tuple[str, str]:
    """Train with the strategy that the documentation shows; return what is said where rank 1 forgets its pieces."""
    page = (Path(__file__).parents[2] / "docs/writing-a-strategy.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (plugin,) = (block for block in blocks if "megaopt_api" in block)
    module = ModuleType("guide")
    exec(plugin, vars(module))  # noqa: S102 - what readers copy is what is tested
    found = []
    with temporary_plugin(module, name="guide"):
        for strategy in ("replicated", "dealt"):
            model, optimizer = make(strategy)
            train(model, optimizer, range(2))
            found.append((values_of(model), state_of(optimizer)))
        assert all(same(mine, other) for mine, other in zip(*found, strict=True))
        if rank == 1:
            module.DealtParams.pieces = property(lambda self: [], lambda self, pieces: None)
        try:
            make("dealt")
        except MegaoptError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def empty_parts(rank: int, size: int, installed: str, folder: str) -> list[float | None]:
    """Step tensors of one row, of which all ranks but one have an empty part; save, and load into both kinds."""
    use(installed)

    def build(seed, sharding):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 1)
        return model, build_optimizer(model, "normed_sgd", lr=0.1, clip_grad=1.0, sharding=sharding)

    def step(model, optimizer):
        model.weight.grad, model.bias.grad = torch.tensor([[3.0, 4.0, 0.0]]), torch.tensor([12.0])
        return optimizer.step().grad_norm

    first, expected = build(0, "parts"), build(0, "replicated")
    norms = [step(*first), step(*expected)]
    save_checkpoint(f"{folder}/parts", *first)
    for strategy in ("parts", "replicated"):
        again = build(1, strategy)
        load_checkpoint(f"{folder}/parts", *again)
        step(*again)
        if strategy == "parts":
            step(*expected)
        norms.append(same(values_of(again[0]), values_of(expected[0])))
    return norms


def reported(rank: int, size: int, installed: str) -> dict[str, tuple[str, int, int]]:
    """Return how every parameter's step travels under whole owners, and the bytes that this rank sends."""
    use(installed)
    _, optimizer = make("round_robin")
    size_of = {name: param.nbytes for param, name in optimizer.names.items()}
    return {row.name: (row.travels, row.bytes, size_of[row.name]) for row in optimizer.report().params}


def everything_else(rank: int, size: int, installed: str, folder: str) -> tuple[Any, ...]:
    """Run what needs no more than one start of processes."""
    return (
        reloaded(rank, size, installed),
        through_dcp(rank, size, installed, folder),
        under_ddp(rank, size, installed),
        partial_gradient(rank, size),
        of_the_guide(rank, size),
        empty_parts(rank, size, installed, folder),
        reported(rank, size, installed),
    )


@pytest.mark.parametrize("size", sometimes([2, 4], [2]))
def test_a_changed_model_dcp_and_gradients_of_ddp(launch, strategies, tmp_path, size):
    """Own memory takes over what the model is given; DCP changes no bit; DDP's gradients step as replicated ones."""
    results = launch(everything_else, size, strategies, str(tmp_path))
    for name in results[0][-1]:
        told = [result[-1][name] for result in results]
        assert {step for step, _, _ in told} == {"whole"}
        assert sum(sent for _, sent, _ in told) == (size - 1) * told[0][2]
        assert sum(sent > 0 for _, sent, _ in told) == 1
    for changed, stored, stepped, gradient, shown, parts, _ in results:
        assert "sharding='dealt' does not attach the pieces that its layout gives this rank" in shown[1]
        assert shown[0] in ("ShardingError", "RoutingError")
        assert parts == [13.0, 13.0, True, True]
        assert gradient == [sum(range(1, size + 1))] * 4
        assert changed == dict.fromkeys(OURS, True)
        assert stored == dict.fromkeys(OURS, True)
        for name, (values, norms) in stepped.items():
            expected = stepped["tiny replicated" if name.startswith("tiny") else "replicated"]
            compare(values, expected[0], exact=False)
            assert norms == pytest.approx(expected[1], rel=1e-6)
            assert not name.startswith("tiny") or norms == [5.0]
