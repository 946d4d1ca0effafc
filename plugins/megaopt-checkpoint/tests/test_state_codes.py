"""A third party's precision policy with a code of its own: its states are saved, loaded and resumed."""

from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from megaopt_checkpoint.values.codes import coded_runs
from megaopt_lowbit.scaled import ScaledCode
from megaopt_testing import temporary_plugin
from random_cuts import random_cuts
from torch import nn
from training import make, rewrite_manifest, same, stand_in, train, values

from megaopt_core import (
    CodedState,
    MegatronOptimizer,
    OptimizerConfig,
    PrecisionPolicy,
    StoredSlice,
    hookimpl,
)
from megaopt_core.errors import CheckpointCorruptError, CheckpointMismatchError, PluginError
from megaopt_core.optimizers import OptimizerPart
from megaopt_core.params import Shard, whole
from megaopt_core.precision import Decoder
from megaopt_core.sharding import Piece, PieceSpec, ShardedParams

pytestmark = pytest.mark.any_python

BLOCK, CODE = 16, "acme.linear8"


def encode8(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 elements and one scale for each block of the flattened piece."""
    blocks = nn.functional.pad(value.reshape(-1), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).div(127).clamp(min=1e-30)
    return (blocks / scales[:, None]).round().to(torch.int8).view(-1)[: value.numel()], scales


def decode8(stored: StoredSlice) -> torch.Tensor:
    """Return the values of elements that begin anywhere in what was saved together."""
    at = stored.values["lead"] + stored.first + torch.arange(stored.elements.numel())
    return stored.elements.float() * torch.as_tensor(stored.values["scales"]).reshape(-1)[at // BLOCK]


class Linear8(PrecisionPolicy):
    """Keeps `exp_avg` in 8 bits between steps."""

    def _store(self, state: MutableMapping[str, Any], value: torch.Tensor) -> None:
        elements, state["exp_avg.scales"] = encode8(value)
        state["exp_avg"] = elements.view(value.shape)

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        if key != "exp_avg":
            return super().read_state(index, key, state)
        coded = {"scales": state["exp_avg.scales"], "lead": 0}
        return decode8(StoredSlice(0, state[key].view(-1), CODE, coded)).view(state[key].shape)

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        if key == "exp_avg":
            self._store(state, value)
        else:
            super().write_state(index, key, state, value)

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        for index, tensor in enumerate(self._stepped):
            state = inner.state.get(tensor, {})
            if "exp_avg" in state:
                state["exp_avg"] = self.read_state(index, "exp_avg", state)
                del state["exp_avg.scales"]
        yield
        for tensor in self._stepped:
            if "exp_avg" in inner.state.get(tensor, {}):
                self._store(inner.state[tensor], inner.state[tensor]["exp_avg"])

    def is_code(self, key: str) -> bool:
        return key == "exp_avg.scales"

    def is_coded(self, index: int, key: str) -> bool:
        return key == "exp_avg"

    def coded_state(self, index: int, key: str, state: Mapping[str, Any]) -> CodedState:
        stored, scales = state[key], state["exp_avg.scales"]

        def numbers(start, stop):
            return {"scales": scales[start // BLOCK : -(-stop // BLOCK)], "lead": start % BLOCK}

        return CodedState(
            CODE, stored.dtype, stored.device, lambda start, stop: stored.view(-1)[start:stop], numbers
        )

    def decoder(self, code: str) -> Decoder | None:
        return decode8 if code == CODE else super().decoder(code)

    def restore_state(
        self, index: int, key: str, state: MutableMapping[str, Any], slices: Sequence[StoredSlice]
    ) -> None:
        tensor = self._stepped[index]
        fits = all(s.code == CODE and s.is_whole and s.start % BLOCK == s.values["lead"] for s in slices)
        if key != "exp_avg" or not fits:
            super().restore_state(index, key, state, slices)
            return
        state[key] = torch.zeros(tensor.shape, dtype=torch.int8)
        state["exp_avg.scales"] = torch.zeros(-(-tensor.numel() // BLOCK))
        for part in slices:
            state[key].view(-1)[part.start : part.stop] = part.elements
            first, last = part.start // BLOCK, -(-part.stop // BLOCK)
            state["exp_avg.scales"][first:last] = torch.as_tensor(part.values["scales"])


class Model(nn.Module):
    """Parameters of many sizes, one without dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scalar = nn.Parameter(torch.randn(()))
        self.vector = nn.Parameter(torch.randn(37))
        self.matrix = nn.Parameter(torch.randn(9, 7))
        self.one = nn.Parameter(torch.randn(1))


class Pieces(ShardedParams):
    """This process's pieces: every parameter by itself, or all of them in one flat piece with padding between."""

    stats_group = None

    def __init__(self, model: nn.Module, flat: bool) -> None:
        named = list(model.named_parameters())
        shards = [Shard(name, tuple(p.shape), whole(tuple(p.shape)), 0, p.numel()) for name, p in named]
        self.pieces = []
        if not flat:
            for (_, param), shard in zip(named, shards, strict=True):
                self.pieces.append(Piece(PieceSpec(0, tuple(param.shape), ((0, shard),)), param, (param,)))
            return
        members, size = [], 3
        for shard in shards:
            members.append((size, shard))
            size += shard.numel + 5
        memory = nn.Parameter(torch.zeros(size))
        self.pieces.append(Piece(PieceSpec(0, (size,), tuple(members)), memory, tuple(p for _, p in named)))
        self._move(lambda mine, param: mine.copy_(param))

    @torch.no_grad()
    def _move(self, move: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        for piece in self.pieces:
            for param, (offset, shard) in zip(piece.model_params, piece.spec.members, strict=True):
                if piece.param is not param:
                    move(piece.param[offset : offset + shard.numel].view(param.shape), param)

    def collect_grads(self) -> None:
        for piece in self.pieces:
            if piece.param is piece.model_params[0]:
                piece.grad = piece.param.grad
                continue
            piece.grad = torch.zeros_like(piece.param)
            for param, (offset, shard) in zip(piece.model_params, piece.spec.members, strict=True):
                piece.grad[offset : offset + shard.numel] = param.grad.reshape(-1)

    def take_model_values(self) -> None:
        self._move(lambda mine, param: mine.copy_(param))

    def start_param_sync(self) -> None:
        self._move(lambda mine, param: param.copy_(mine))

    def finish_param_sync(self) -> None:
        pass


def build(policy: PrecisionPolicy, *, flat: bool = False, seed: int = 0) -> tuple[Model, MegatronOptimizer]:
    """Return a model and its AdamW under a policy."""
    model = Model(seed)
    sharded = Pieces(model, flat)
    stepped = policy.attach(sharded.pieces)
    inner = torch.optim.AdamW(stepped, lr=0.01, foreach=False)
    groups = [{**inner.param_groups[0], "params": list(model.parameters())}]
    names = {param: name for name, param in model.named_parameters()}
    config = OptimizerConfig(lr=0.01, clip_grad=0.0)
    part = OptimizerPart(inner, policy, sharded, stepped, groups, config)
    return model, MegatronOptimizer([part], config=config, names=names)


def stored(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return every tensor of the state as it is stored."""
    found = {}
    for index, tensor in enumerate(optimizer.parts[0].stepped):
        for key, value in optimizer.parts[0].inner.state[tensor].items():
            found[f"{index}.{key}"] = value
    return found


def decoded(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return `exp_avg` of every parameter as arithmetic sees it."""
    return {name: optimizer.state[p]["exp_avg"].clone().view(p.shape) for name, p in model.named_parameters()}


class Reader:
    """A plugin that reads the code."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_state_codes(self) -> dict[str, Decoder]:
        return {CODE: decode8}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_same_policy_resumes_bit_for_bit(tmp_path, flat, steps):
    """Elements and scales are those that were saved, and so are the steps that follow, before the first step too."""
    model, optimizer = build(Linear8(), flat=flat)
    train(model, optimizer, range(steps))
    save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = build(Linear8(), flat=flat, seed=1)
    load_checkpoint(tmp_path / "last", other_model, other)
    assert same(stored(optimizer), stored(other))
    train(model, optimizer, range(steps, steps + 3))
    train(other_model, other, range(steps, steps + 3))
    assert same(values(model), values(other_model))
    assert same(stored(optimizer), stored(other))
    assert stored(optimizer)["0.exp_avg"].dtype == torch.int8


def test_a_load_replaces_state_that_is_there(tmp_path):
    """As for an optimizer that has stepped already."""
    model, optimizer = build(Linear8())
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = build(Linear8(), seed=1)
    train(other_model, other, range(5, 7))
    load_checkpoint(tmp_path / "last", other_model, other)
    assert same(stored(optimizer), stored(other))


@pytest.mark.parametrize("flat", [False, True])
def test_another_layout_has_the_decoded_values(tmp_path, flat):
    """They are encoded again where blocks fall differently."""
    model, optimizer = build(Linear8(), flat=flat)
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "last", model, optimizer)
    expected = decoded(model, optimizer)
    plain_model, plain = build(PrecisionPolicy(), flat=not flat, seed=1)
    other_model, other = build(Linear8(), flat=not flat, seed=1)
    with temporary_plugin(Reader(), "reader"):
        load_checkpoint(tmp_path / "last", plain_model, plain)
    load_checkpoint(tmp_path / "last", other_model, other)
    assert same(decoded(plain_model, plain), expected)
    for tensor, held in zip(other.parts[0].stepped, plain.parts[0].stepped, strict=True):
        elements, scales = encode8(plain.parts[0].inner.state[held]["exp_avg"])
        state = other.parts[0].inner.state[tensor]
        assert torch.equal(state["exp_avg"].view(-1), elements)
        assert torch.equal(state["exp_avg.scales"], scales)


def test_into_another_policy_and_back(tmp_path):
    """A policy of full precision gets the decoded values; what it saves is encoded when it comes back."""
    model, optimizer = build(Linear8())
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "coded", model, optimizer)
    plain_model, plain = build(PrecisionPolicy(), seed=1)
    with temporary_plugin(Reader(), "reader"):
        load_checkpoint(tmp_path / "coded", plain_model, plain)
    assert same(decoded(plain_model, plain), decoded(model, optimizer))
    save_checkpoint(tmp_path / "plain", plain_model, plain)
    again_model, again = build(Linear8(), seed=2)
    load_checkpoint(tmp_path / "plain", again_model, again)
    for name, param in again_model.named_parameters():
        elements, scales = encode8(decoded(model, optimizer)[name])
        state = again.parts[0].inner.state[param]
        assert torch.equal(state["exp_avg"].view(-1), elements)
        assert torch.equal(state["exp_avg.scales"], scales)


def test_a_code_that_nothing_reads_is_refused_before_anything_changes(tmp_path):
    """The error names state, parameter and code, and the hook that would read it."""
    model, optimizer = build(Linear8())
    train(model, optimizer, range(1))
    save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = build(PrecisionPolicy(), seed=1)
    before = values(other_model)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"state 'exp_avg' of 'scalar' .* stored in the code 'acme.linear8'.*megaopt_state_codes",
    ) as caught:
        load_checkpoint(tmp_path / "last", other_model, other)
    assert caught.value.names == ("scalar",)
    assert same(values(other_model), before)
    assert stored(other) == {}


def test_a_range_without_its_code_is_refused(tmp_path):
    """A manifest that lost one is not read as if its elements were zero."""
    model, optimizer = build(Linear8())
    train(model, optimizer, range(1))
    save_checkpoint(tmp_path / "last", model, optimizer)
    manifest = read_manifest(tmp_path / "last")
    manifest.parameters["vector"]["state"]["exp_avg"]["codes"][0][3] = 36
    rewrite_manifest(tmp_path / "last", manifest)
    with pytest.raises(
        CheckpointCorruptError, match=r"optim.state.vector.exp_avg is 36, which is not the 37 elements"
    ):
        load_checkpoint(tmp_path / "last", model, optimizer)


def test_offers_of_codes_that_cannot_be_are_refused():
    """What is no function, and a name that two give."""

    class Wrong:
        megaopt_api = "1"

        @hookimpl
        def megaopt_state_codes(self):
            return {"wrong": 8}

    with (
        temporary_plugin(Wrong(), "wrong"),
        pytest.raises(PluginError, match="'wrong': int; it must be a function"),
    ):
        PrecisionPolicy().decoder("wrong")
    with (
        temporary_plugin(Reader(), "one"),
        temporary_plugin(Reader(), "two"),
        pytest.raises(PluginError, match=r"state code 'acme\.linear8' is given by .*'one'.* and by .*'two'"),
    ):
        PrecisionPolicy().decoder(CODE)


@pytest.mark.parametrize("flat", [False, True])
def test_torch_saves_and_loads_a_code(tmp_path, flat):
    """Through `checkpoint_state`, at the same layout: elements and scales as they were saved."""
    model, optimizer = build(Linear8(), flat=flat)
    train(model, optimizer, range(3))
    other_model, other = build(Linear8(), flat=flat, seed=1)
    train(other_model, other, range(5, 6))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"optim": optimizer.checkpoint_state()}, checkpoint_id=tmp_path / "last", no_dist=True)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"optim": other.checkpoint_state()}, checkpoint_id=tmp_path / "last", no_dist=True)
    assert same(stored(optimizer), stored(other))


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_reads_its_part_of_states_with_a_scale(tmp_path, rank):
    """fp16 moments, cut anywhere: what was decoded is encoded again, with the scale of this rank's own piece."""
    fewer = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp16"}
    code = ScaledCode(torch.float16)
    with stand_in(), random_cuts(1, ranks=3, rank=rank):
        model, optimizer = make(**fewer)
        train(model, optimizer, range(2))
        save_checkpoint(tmp_path / "last", model, optimizer)
        other_model, other = make(seed=1, sharding="cut1", **fewer)
        load_checkpoint(tmp_path / "last", other_model, other)
        for part in other.parts:
            for index, piece in enumerate(part.pieces):
                found = part.precision.read_state(index, "exp_avg", part.inner.state[part.stepped[index]])
                expected = torch.zeros(found.numel())
                for (offset, shard), param in zip(piece.spec.members, piece.model_params, strict=True):
                    (theirs,) = [p for p in model.parameters() if optimizer.names[p] == shard.name]
                    whole_state = optimizer.state[theirs]["exp_avg"].reshape(-1)
                    expected[offset : offset + shard.numel] = whole_state[shard.start : shard.stop]
                    assert other.names[param] == shard.name
                assert torch.equal(found, code.decode(*code.encode(expected)))


BOXES = [
    (((), ()), ((), ())),
    (((0,), (6,)), ((2,), (7,))),
    (((0, 2), (3, 2)), ((0, 0), (3, 4))),
    (((1, 0), (2, 4)), ((0, 0), (3, 4))),
    (((0, 1, 0), (2, 2, 3)), ((1, 0, 1), (2, 4, 2))),
    (((0, 0), (2, 2)), ((2, 2), (2, 2))),
    (((0, 0), (2, 3)), ((0, 0), (2, 3))),
]


@pytest.mark.parametrize(("here", "there"), BOXES)
@pytest.mark.parametrize(("front", "back"), [(0, 0), (1, 1), (2, 0)])
def test_every_element_is_found_where_it_was_saved(here, there, front, back):
    """Runs of elements, against the coordinates of each."""

    def elements(box):
        offsets, sizes = box
        every = (
            torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist() if sizes else [[]]
        )
        return [tuple(at + offset for at, offset in zip(place, offsets, strict=True)) for place in every]

    mine, saved = elements(here), elements(there)
    start, stop = min(front, len(mine)), max(len(mine) - back, min(front, len(mine)))
    low, high = min(back, len(saved)), max(len(saved) - front, min(back, len(saved)))
    shape = tuple(9 for _ in here[0])
    shard = Shard("w", shape, here, start, stop)
    expected = {
        at: saved.index(place) - low for at, place in enumerate(mine[start:stop]) if place in saved[low:high]
    }
    runs = coded_runs([[*map(list, there), low, high, "code", None]], shard)
    found = {run.start + i: run.first + i for run in runs for i in range(run.stop - run.start)}
    assert found == expected
    assert all(run.count == high - low for run in runs)
