"""Matrices of 32 bits that are iterated together on a processor."""

import pytest
import torch
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.newton_schulz.norms import all_normalized
from megaopt_muon.pieces.batches import batch_limit
from megaopt_muon.pieces.execution import merged, orthogonalize_pieces
from megaopt_muon.pieces.plans import plan_parameter
from megaopt_muon.products.workspace import Workspace

from megaopt_core.params import MatrixView

pytestmark = pytest.mark.any_python

PROCESSOR = torch.device("cpu")


def test_what_depends_on_singular_values_goes_alone():
    """Small matrices go together; of larger ones those in which no run of steps can pay: that are nearly square."""
    together = [
        batch_limit(*shape, PROCESSOR) > 1 for shape in ((64, 64), (128, 512), (256, 256), (256, 383))
    ]
    alone = [batch_limit(*shape, PROCESSOR) == 1 for shape in ((256, 384), (512, 256), (768, 768))]
    assert all(together)
    assert all(alone)


@pytest.mark.parametrize("shape", [(24, 40), (128, 512), (256, 256), (300, 260)])
def test_a_matrix_does_not_depend_on_its_batch(shape):
    """Alone, among others and after others, it becomes the same, bit for bit."""
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), "highest")
    generator = torch.Generator().manual_seed(0)
    updates = [torch.randn(shape, generator=generator) for _ in range(5)]
    plan = plan_parameter(updates[0], MatrixView(), None, "duplicated", lambda *_: 1.0)
    together = [o.values.clone() for _, _, o in orthogonalize_pieces(ns, [plan] * 5, updates)]
    for update, expected in zip(updates, together, strict=True):
        assert torch.equal(merged(ns, plan, update, scaled=True), expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e30])
def test_norms_are_those_of_float64(scale):
    """To a unit in the last place of float32, also where squares leave its range, and down to the floor."""
    generator = torch.Generator().manual_seed(1)
    updates = [scale * torch.randn(30, 50, generator=generator) for _ in range(3)]
    out = torch.empty(3, 30, 50)
    all_normalized(updates, out, 1e-15)
    for update, slot in zip(updates, out, strict=True):
        expected = update.double() / update.double().norm().clamp_min(1e-15)
        torch.testing.assert_close(slot.double(), expected, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_a_norm_out_of_range_leaves_the_others_alone(bad):
    """What is known of one matrix only changes no bit of another."""
    updates = list(torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(2)))
    clean, out = torch.empty(2, 3, 12, 20)
    all_normalized(updates, clean, 1e-15)
    updates[1][0, 0] = bad
    all_normalized(updates, out, 1e-15)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert not torch.equal(out[1], clean[1])


def test_memory_that_has_grown_is_taken_by_all():
    """A shape that was asked for before gets the new memory, not what was given back."""
    workspace = Workspace()
    before = workspace.take("x", (4, 4), torch.float32, PROCESSOR)
    large = workspace.take("x", (64, 64), torch.float32, PROCESSOR)
    after = workspace.take("x", (4, 4), torch.float32, PROCESSOR)
    assert after.data_ptr() == large.data_ptr() != before.data_ptr()
    assert workspace.take("x", (4, 4), torch.float32, PROCESSOR) is after
