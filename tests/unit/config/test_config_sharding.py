"""`sharding`, its two flags and `optimizer="dist_..."` are four spellings of one setting."""

import pytest

from megaopt_core import OptimizerConfig
from megaopt_core.errors import ConfigurationError


def strategy(config: OptimizerConfig) -> tuple[str | None, bool, bool]:
    """The three fields."""
    return config.sharding, config.use_distributed_optimizer, config.use_layer_wise_distributed_optimizer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, False, False)),
        ({"use_distributed_optimizer": True}, ("distributed", True, False)),
        ({"use_layer_wise_distributed_optimizer": True}, ("layer_wise", False, True)),
        ({"sharding": "distributed"}, ("distributed", True, False)),
        (
            {"sharding": "layer_wise", "use_layer_wise_distributed_optimizer": True},
            ("layer_wise", False, True),
        ),
        ({"sharding": "mine", "use_distributed_optimizer": False}, ("mine", False, False)),
        ({"sharding": None, "use_distributed_optimizer": True}, ("distributed", True, False)),
    ],
)
def test_spellings_agree(given, expected) -> None:
    """Whoever reads any of the three fields learns the same."""
    assert strategy(OptimizerConfig(**given)) == expected


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        (
            {"use_distributed_optimizer": True, "use_layer_wise_distributed_optimizer": True},
            "use_distributed_optimizer=True",
            "use_layer_wise_distributed_optimizer=True",
        ),
        (
            {"use_distributed_optimizer": True, "sharding": "layer_wise"},
            "use_distributed_optimizer=True",
            "sharding='layer_wise'",
        ),
        (
            {"use_layer_wise_distributed_optimizer": True, "sharding": "mine"},
            "use_layer_wise_distributed_optimizer=True",
            "sharding='mine'",
        ),
    ],
)
def test_a_conflict_names_both(given, first, second) -> None:
    """None of them wins silently."""
    with pytest.raises(ConfigurationError) as caught:
        OptimizerConfig(**given)
    assert (
        str(caught.value) == f"{first} and {second} ask for different sharding strategies; keep one of them"
    )


def test_dist_names_mean_layer_wise() -> None:
    """An old spelling, with a warning that says the new one."""
    with pytest.warns(DeprecationWarning, match="dist_muon") as caught:
        config = OptimizerConfig(optimizer="dist_muon")
    assert str(caught[0].message) == (
        "optimizer='dist_muon' is deprecated: write optimizer='muon', sharding='layer_wise'"
    )
    assert caught[0].filename == __file__
    assert config.optimizer == "muon"
    assert strategy(config) == ("layer_wise", False, True)
    config.lr = 0.1  # no second warning: the old spelling is gone


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dist_names_conflict_with_other_strategies() -> None:
    """The name is a setting of the strategy too."""
    with pytest.raises(ConfigurationError) as caught:
        OptimizerConfig(optimizer="dist_muon", use_distributed_optimizer=True)
    assert str(caught.value) == (
        "optimizer='dist_muon' and use_distributed_optimizer=True ask for different sharding strategies; "
        "keep one of them"
    )


def test_a_change_of_one_spelling_replaces_the_others() -> None:
    """By `replace` and by assignment."""
    config = OptimizerConfig(use_distributed_optimizer=True)
    assert strategy(config.replace(sharding="layer_wise")) == ("layer_wise", False, True)
    assert strategy(config.replace(use_distributed_optimizer=False)) == (None, False, False)
    assert strategy(config.replace(lr=0.1)) == ("distributed", True, False)
    config.use_layer_wise_distributed_optimizer = True
    assert strategy(config) == ("layer_wise", False, True)
    config.sharding = None
    assert strategy(config) == (None, False, False)


def test_what_is_written_can_be_changed() -> None:
    """A file that holds all three fields is no trap."""
    config = OptimizerConfig.from_dict(OptimizerConfig(sharding="distributed").to_dict())
    assert strategy(config.replace(sharding="layer_wise")) == ("layer_wise", False, True)
