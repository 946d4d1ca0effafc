"""Files hold state by parameter name: an optimizer of torch's own is refused in words."""

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint

from megaopt_core.errors import ConfigurationError


@pytest.mark.parametrize("act", [save_checkpoint, load_checkpoint])
def test_a_plain_torch_optimizer_is_refused(tmp_path, act) -> None:
    """It says how to save one; nothing is written."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConfigurationError, match=r"^optimizer: got AdamW; build it with build_optimizer, wrap it in"
    ):
        act(tmp_path / "a", model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        ConfigurationError,
        match=r"^optimizer: got str; give the optimizer that build_optimizer returned, or None$",
    ):
        act(tmp_path / "a", model, "adam")
    assert list(tmp_path.iterdir()) == []
