"""Symmetric products equal full ones."""

import pytest
import torch
from megaopt_muon.symmetric import block_rows, symmetric_addmm, symmetric_mm


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("size", [1, 5, 223, 224, 301, 520])
def test_symmetric_products_equal_full_ones(size, batch):
    """Every size and batch gives what one full product gives, exactly symmetric."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(*batch, size, 40, generator=generator, dtype=torch.float64)
    out = symmetric_mm(x, x.mT, torch.full((*batch, size, size), torch.nan, dtype=torch.float64))
    torch.testing.assert_close(out, x @ x.mT, rtol=0, atol=1e-12)
    gram = out / size
    result = symmetric_addmm(gram, gram, gram, beta=-2.0, alpha=3.0, out=torch.empty_like(gram))
    torch.testing.assert_close(result, -2.0 * gram + 3.0 * gram @ gram, rtol=0, atol=1e-10)
    in_place = gram.clone()
    assert torch.equal(symmetric_addmm(in_place, gram, gram, beta=-2.0, alpha=3.0, out=in_place), result)
    if block_rows(size, torch.float64, x.device) < size:
        height = block_rows(size, torch.float64, x.device)
        assert torch.equal(result[..., height:, :height], result[..., :height, height:].mT)


def test_an_accelerator_takes_one_call():
    """Block rows are for CPUs."""
    assert block_rows(4096, torch.bfloat16, torch.device("meta")) == 4096
