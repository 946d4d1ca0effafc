"""Settings that Megatron has added are known names."""

import pytest

from megaopt_core import OptimizerConfig
from megaopt_core.errors import UnknownSettingError

MEANT = {
    "chunked_optimizer_state_offload": "overlap_cpu_optimizer_d2h_h2d=True",
    "muon_use_syrk": "pip install megaopt-muon[hopper]",
    "optimizer_state_offload_fraction": "optimizer_offload_fraction",
    "use_layer_wise_param_layout": "plan_full_param_layout",
}


@pytest.mark.any_python
@pytest.mark.parametrize("name", MEANT)
def test_the_error_says_which_setting_does_it(name: str) -> None:
    """By the name that it has here, or by what does the same."""
    with pytest.raises(UnknownSettingError) as caught:
        OptimizerConfig(**{name: 1})
    assert MEANT[name] in str(caught.value)
