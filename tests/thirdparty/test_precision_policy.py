"""An outsider's precision policy, by public names: momentum in fp16 with a scale per tensor, saved and resharded."""

import math
from collections.abc import Generator, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_testing import run_ranks, temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, PrecisionPolicy, build_optimizer, hookimpl
from megaopt_core.precision import CodedState, Decoder, StoredSlice

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

KEY, SCALE, CODE = "momentum_buffer", "momentum_buffer_factor", "outsider.halves"
LARGEST = 2.0**15
"""Numbers up to it are stored: every scale is a power of two, so that decoding is exact."""


class HalfMomentum(PrecisionPolicy):
    """Keeps momentum in fp16 between steps, with one scale a tensor, and steps it in fp32."""

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        """Decode, hand over, and encode again."""
        held = [tensor for group in inner.param_groups for tensor in group["params"]]
        for state in (inner.state[tensor] for tensor in held if inner.state.get(tensor)):
            if SCALE in state:
                state[KEY] = state[KEY].float() * state.pop(SCALE)
        yield
        for state in (inner.state[tensor] for tensor in held if inner.state.get(tensor)):
            if isinstance(state.get(KEY), torch.Tensor):
                self._encode(state, state[KEY])

    def _encode(self, state: MutableMapping[str, Any], value: torch.Tensor) -> None:
        largest = float(value.detach().abs().max()) if value.numel() else 0.0
        scale = 2.0 ** math.ceil(math.log2(largest / LARGEST)) if largest else 1.0
        state[KEY], state[SCALE] = (value / scale).half(), torch.tensor(scale)

    def is_code(self, key: str) -> bool:
        """A scale is saved with the state that it scales."""
        return key == SCALE

    def is_coded(self, index: int, key: str) -> bool:
        """Momentum is."""
        return key == KEY

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        """Decode momentum."""
        return state[KEY].float() * state[SCALE] if key == KEY and SCALE in state else state[key]

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        """Encode momentum."""
        if key == KEY and isinstance(value, torch.Tensor):
            self._encode(state, value)
        else:
            super().write_state(index, key, state, value)

    def coded_state(self, index: int, key: str, state: Mapping[str, Any]) -> CodedState | None:
        """Save elements as they are stored, each slice with the scale."""
        if SCALE not in state:
            return None
        stored, scale = state[KEY].reshape(-1), float(state[SCALE])
        return CodedState(
            CODE,
            stored.dtype,
            stored.device,
            lambda start, stop: stored[start:stop],
            lambda start, stop: {"scale": scale},
        )


def decode(stored: StoredSlice) -> torch.Tensor:
    """Return the values of a slice."""
    return stored.elements.float() * stored.values["scale"]


class Outsider:
    """The plugin, with an optimizer to try it with."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_precision_policies(self) -> dict[str, type[PrecisionPolicy]]:
        """Return the policy."""
        return {"half-momentum": HalfMomentum}

    @hookimpl
    def megaopt_state_codes(self) -> dict[str, Decoder]:
        """Return the decoder of what it saves."""
        return {CODE: decode}

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return SGD, whose arguments nothing changes."""
        return {
            "heavy": OptimizerEntry(torch.optim.SGD, config_to_kwargs=lambda *_: {"lr": 0.1, "momentum": 0.9})
        }


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register it; forked ranks have it too."""
    with temporary_plugin(Outsider(), "outsider"):
        yield


def _built(seed: int = 0, **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    settings = {"precision": "half-momentum", **settings}
    return model, build_optimizer(model, "heavy", lr=0.1, clip_grad=0.0, overrides={}, **settings)


def _step(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def _momentum(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the momentum that each named slice of this rank has, as arithmetic sees it."""
    return {name: optimizer.state[param][KEY].detach().clone() for param, name in optimizer.names.items()}


def _stored(optimizer: Any) -> list[Mapping[str, Any]]:
    return [state for part in optimizer.parts for state in part.inner.state.values()]


def test_momentum_is_kept_in_half_and_stepped_in_full() -> None:
    """A step differs from fp32's by the rounding of momentum alone."""
    model, optimizer = _built()
    full, reference = _built(precision="fp32")
    _step(model, optimizer, range(3))
    _step(full, reference, range(3))
    assert [(state[KEY].dtype, state[SCALE].dtype) for state in _stored(optimizer)] == [
        (torch.float16, torch.float32)
    ] * 4
    for name, momentum in _momentum(optimizer).items():
        exact = _momentum(reference)[name]
        assert momentum.dtype == torch.float32
        assert not torch.equal(momentum, exact)
        assert torch.allclose(momentum, exact, rtol=2.0**-9, atol=1e-3)
    for param, exact in zip(model.parameters(), full.parameters(), strict=True):
        assert torch.allclose(param, exact, atol=1e-3)


def _save_over_ranks(rank: int, size: int, path: str) -> None:
    model, optimizer = _built(sharding="distributed")
    _step(model, optimizer, range(3))
    save_checkpoint(path, model, optimizer)


def _load_over_ranks(rank: int, size: int, path: str) -> list[torch.Tensor]:
    model, optimizer = _built(seed=1, sharding="distributed")
    load_checkpoint(path, model, optimizer)
    assert all(state[KEY].dtype == torch.float16 for state in _stored(optimizer))
    _step(model, optimizer, range(3, 5))
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("saved_by", [1, 2])
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_what_it_saves_is_loaded_over_as_many_ranks_and_over_others(
    saved_by, loaded_by, tmp_path: Path
) -> None:
    """Training goes on where it was; a tensor that two ranks share out has a scale for each part."""
    pytest.importorskip("megaopt_distributed")
    path = str(tmp_path / "saved")
    if saved_by == 1:
        model, optimizer = _built()
        _step(model, optimizer, range(3))
        save_checkpoint(path, model, optimizer)
    else:
        run_ranks(_save_over_ranks, saved_by, path)
    if loaded_by == 1:
        model, optimizer = _built(seed=1)
        load_checkpoint(path, model, optimizer)
        assert all(state[KEY].dtype == torch.float16 for state in _stored(optimizer))
        _step(model, optimizer, range(3, 5))
        results = [list(model.parameters())]
    else:
        results = run_ranks(_load_over_ranks, loaded_by, path)
    undisturbed, reference = _built()
    _step(undisturbed, reference, range(5))
    for params in results:
        for param, expected in zip(params, undisturbed.parameters(), strict=True):
            if saved_by == loaded_by == 1:
                assert torch.equal(param, expected)
            assert torch.allclose(param, expected, atol=2e-3)


def test_a_run_without_the_policy_reads_what_it_saved(tmp_path: Path) -> None:
    """By the decoder that the plugin offers; and the other way round."""
    model, optimizer = _built()
    _step(model, optimizer, range(3))
    save_checkpoint(str(tmp_path / "halves"), model, optimizer)
    plain, without = _built(seed=1, precision="fp32")
    load_checkpoint(str(tmp_path / "halves"), plain, without)
    for name, momentum in _momentum(optimizer).items():
        assert torch.equal(_momentum(without)[name], momentum)
    save_checkpoint(str(tmp_path / "full"), plain, without)
    back, again = _built(seed=2)
    load_checkpoint(str(tmp_path / "full"), back, again)
    for name, momentum in _momentum(optimizer).items():
        assert torch.equal(_momentum(again)[name], momentum)
