"""A policy of an outsider keeps momentum in fp16 with a scale a tensor: chosen, saved, loaded and cut otherwise."""

from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import run_ranks, temporary_plugin
from torch import nn

from megaopt_core import CodedState, OptimizerEntry, PrecisionPolicy, StoredSlice, build_optimizer, hookimpl
from megaopt_core.errors import CheckpointMismatchError

CODE = "outsider.halves"
MOMENTUM, SCALE = "momentum_buffer", "momentum_buffer.outsider"


def decode(stored: StoredSlice) -> torch.Tensor:
    """Return the values of elements that were stored with one scale."""
    return stored.elements.float() * torch.as_tensor(stored.values["scale"])


class Halves(PrecisionPolicy):
    """Keeps the momentum of SGD in fp16 between steps, divided by its largest magnitude."""

    def _encode(self, state: MutableMapping[str, Any], value: torch.Tensor) -> None:
        state[SCALE] = value.abs().amax().clamp(min=1e-30)
        state[MOMENTUM] = (value / state[SCALE]).half()

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        """Decode, hand over, and encode again."""
        for state in inner.state.values():
            if SCALE in state:
                state[MOMENTUM] = state[MOMENTUM].float() * state.pop(SCALE)
        try:
            yield
        finally:
            for state in inner.state.values():
                if state.get(MOMENTUM) is not None:
                    self._encode(state, state[MOMENTUM])

    def is_code(self, key: str) -> bool:
        """Return whether a key is the scale."""
        return key == SCALE

    def is_coded(self, index: int, key: str) -> bool:
        """Return whether a key is the momentum."""
        return key == MOMENTUM

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        """Return the momentum decoded."""
        coded = key == MOMENTUM and SCALE in state
        return state[key].float() * state[SCALE] if coded else super().read_state(index, key, state)

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        """Store the momentum encoded."""
        if key == MOMENTUM and value is not None:
            self._encode(state, value)
        else:
            super().write_state(index, key, state, value)

    def coded_state(self, index: int, key: str, state: Mapping[str, Any]) -> CodedState | None:
        """Return elements and scale."""
        if SCALE not in state:
            return None
        stored, scale = state[key], state[SCALE]
        return CodedState(
            CODE,
            stored.dtype,
            stored.device,
            lambda a, b: stored.view(-1)[a:b],
            lambda a, b: {"scale": scale},
        )

    def restore_state(
        self, index: int, key: str, state: MutableMapping[str, Any], slices: Sequence[StoredSlice]
    ) -> None:
        """Take one whole tensor over as it is."""
        if key != MOMENTUM or len(slices) != 1 or slices[0].code != CODE:
            super().restore_state(index, key, state, slices)
            return
        state[SCALE] = torch.as_tensor(slices[0].values["scale"]).reshape(())
        state[MOMENTUM] = slices[0].elements.clone().view(self.grad_shape(index))

    def grad_shape(self, index: int) -> torch.Size:
        """Return the shape of a piece."""
        return self._stepped[index].shape


class Plugin:
    """The outsider's plugin."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {
            "heavy-ball": OptimizerEntry(
                torch.optim.SGD,
                config_to_kwargs=lambda config, chunks, groups: {"lr": config.lr, "momentum": 0.9},
            )
        }

    @hookimpl
    def megaopt_precision_policies(self) -> dict[str, type[PrecisionPolicy]]:
        return {"outsider.halves": Halves}


class PluginWithDecoder(Plugin):
    """And what reads its code."""

    @hookimpl
    def megaopt_state_codes(self) -> dict[str, Any]:
        return {CODE: decode}


def build(seed: int = 0, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer under the policy, unless another one is asked for."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    asked = {"precision": "outsider.halves", "clip_grad": 0.0, **settings}
    return model, build_optimizer(model, "heavy-ball", lr=0.1, **asked)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Take steps, the same on every rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def momentum(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return it as arithmetic sees it."""
    return {name: optimizer.state[param][MOMENTUM].clone() for name, param in model.named_parameters()}


@pytest.fixture
def outsider() -> Iterator[None]:
    """Install the plugin."""
    with temporary_plugin(PluginWithDecoder(), name="outsider"):
        yield


def test_a_resume_goes_on_bit_for_bit(tmp_path, outsider) -> None:
    """Elements and scale are those that were saved."""
    model, optimizer = build()
    train(model, optimizer, range(3))
    (part,) = optimizer.parts
    assert part.inner.state[part.stepped[0]][MOMENTUM].dtype == torch.float16
    save_checkpoint(tmp_path / "last", model, optimizer)
    train(model, optimizer, range(3, 6))
    other_model, other = build(seed=1)
    load_checkpoint(tmp_path / "last", other_model, other)
    train(other_model, other, range(3, 6))
    assert all(map(torch.equal, model.parameters(), other_model.parameters()))


@pytest.mark.parametrize(("there", "here"), [("outsider.halves", None), (None, "outsider.halves")])
def test_another_policy_goes_on_from_the_values(tmp_path, outsider, there, here) -> None:
    """Decoded, or encoded anew: fp16 with a scale keeps three digits."""
    model, optimizer = build(precision=there)
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "last", model, optimizer)
    other_model, other = build(seed=1, precision=here)
    load_checkpoint(tmp_path / "last", other_model, other)
    expected = momentum(model, optimizer)
    for name, value in momentum(other_model, other).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-6)


def test_without_a_decoder_the_load_says_what_is_missing(tmp_path) -> None:
    """And changes nothing."""
    with temporary_plugin(Plugin(), name="outsider"):
        model, optimizer = build()
        train(model, optimizer, range(2))
        save_checkpoint(tmp_path / "last", model, optimizer)
        other_model, other = build(seed=1, precision=None)
        before = [param.detach().clone() for param in other_model.parameters()]
        with pytest.raises(CheckpointMismatchError, match=f"in the code '{CODE}', which nothing here reads"):
            load_checkpoint(tmp_path / "last", other_model, other)
        assert all(map(torch.equal, before, other_model.parameters()))


def _resharded(rank: int, size: int, folder: str) -> None:
    """Go on on ranks that are copies of this process, its plugin included."""
    torch.set_num_threads(1)
    model, optimizer = build(seed=1, sharding="distributed")
    load_checkpoint(folder, model, optimizer)
    train(model, optimizer, range(3, 5))
    save_checkpoint(folder + "-two", model, optimizer)


def test_two_ranks_go_on_where_one_stopped(tmp_path, outsider) -> None:
    """Each rank's piece is encoded anew, and the checkpoint of both loads in one process."""
    pytest.importorskip("megaopt_distributed")
    model, optimizer = build()
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "last", model, optimizer)
    run_ranks(_resharded, 2, str(tmp_path / "last"))
    train(model, optimizer, range(3, 5))
    other_model, other = build(seed=1)
    load_checkpoint(tmp_path / "last-two", other_model, other)
    for param, expected in zip(other_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-3, atol=1e-4)
