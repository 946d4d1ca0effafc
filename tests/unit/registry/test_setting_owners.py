"""Every setting of a plugin has one owner."""

import pytest

from megaopt_core import OptimizerConfig
from megaopt_core.errors import BrokenPluginWarning, DuplicateNameError

OFFERS_WITH_SETTINGS = """
@frozen
class Settings:
    beta: float = field(default=0.5, metadata={"help": "how much is kept"})

@hookimpl
def megaopt_optimizer_entries():
    return {"kept": OptimizerEntry(torch.optim.SGD, settings=Settings, setting_prefixes=("kept",))}
"""


def test_settings_have_owners(plugins) -> None:
    """Full name, prefix, default, type and help of each."""
    plugins.install("kept", OFFERS_WITH_SETTINGS)
    owners = plugins.registry().setting_owners()
    info = owners["kept_beta"]
    assert list(owners) == ["kept_beta"]
    assert (info.prefix, info.default, info.type, info.help) == ("kept", 0.5, "float", "how much is kept")
    assert (info.entry, info.plugin.name) == ("kept", "kept")


def test_two_owners_of_one_setting_are_refused(plugins) -> None:
    """Two prefixes that overlap would make one name mean two things."""
    plugins.install("kept", OFFERS_WITH_SETTINGS)
    plugins.install("other", OFFERS_WITH_SETTINGS.replace('return {"kept"', 'return {"other"'))
    registry = plugins.registry()
    with pytest.raises(DuplicateNameError) as caught:
        OptimizerConfig(kept_beta=0.1)
    assert str(caught.value) == (
        "setting 'kept_beta' is given by plugin 'kept' (megaopt-kept 1.0) for optimizer 'kept' and by "
        "plugin 'other' (megaopt-other 1.0) for optimizer 'other'; each needs a setting prefix of its own"
    )
    with pytest.raises(DuplicateNameError, match="setting 'kept_beta'"):
        OptimizerConfig().kept_beta  # noqa: B018 - reading is what raises
    assert sorted(registry.optimizers()) == ["kept", "other"]
    assert OptimizerConfig(lr=0.1).lr == 0.1


def test_a_setting_cannot_have_the_name_of_a_core_field(plugins) -> None:
    """`clip` and `grad` make `clip_grad`."""
    plugins.install("clip", OFFERS_WITH_SETTINGS.replace('("kept",)', '("clip",)').replace("beta:", "grad:"))
    plugins.install("kept", OFFERS_WITH_SETTINGS.replace('{"kept"', '{"good"'))
    registry = plugins.registry()
    with pytest.warns(
        BrokenPluginWarning, match=r"^plugin 'clip' .* setting 'clip_grad' of optimizer 'kept' is a"
    ):
        registry.load()
    assert list(registry.optimizers()) == ["good"]
