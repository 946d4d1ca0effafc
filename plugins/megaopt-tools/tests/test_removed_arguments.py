"""Arguments of other trainers that are gone are refused by name, with what replaces them."""

import pytest
import torch

from megaopt_core import OptimizerConfig, build_optimizer, get_megatron_optimizer
from megaopt_core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "key"), [("no_weight_decay_cond", "wd_mult"), ("scale_lr_cond", "max_lr"), ("lr_mult", "max_lr")]
)
def test_an_argument_that_is_gone_says_what_replaces_it(plugins, name, key):
    """In both builders, before anything is looked at."""
    plugins.registry("adam", "tools")
    model = torch.nn.Linear(2, 2)
    wanted = rf"{name}.* has been removed: an override says it.*\{{'{key}': .*get_standard_config_overrides\(config\)"
    with pytest.raises(ConfigurationError, match=wanted):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [model], **{name: print})
    with pytest.raises(ConfigurationError, match=wanted):
        build_optimizer(model, "adam", lr=0.1, **{name: print})


def test_an_argument_that_never_was_is_pythons_own_error():
    """As for any function."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [torch.nn.Linear(2, 2)], no_such=1)
