"""Every parameter gets one optimizer and one group, with the reason for it."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megaopt_testing.plugins import temporary_plugin

from megaopt_core import (
    Granularity,
    MatrixView,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    Role,
    Routing,
    get_mup_config_overrides,
    get_standard_config_overrides,
    hookimpl,
    route,
)
from megaopt_core.errors import (
    ConfigurationError,
    OverrideConflictError,
    OverrideError,
    RoutingChangedError,
    RoutingError,
    UnmatchedKeyError,
)
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.routing._groups import GroupKey, order_children
from megaopt_core.sharding import Replicated, ShardingStrategy


class Model(torch.nn.Module):
    """An embedding, a hidden layer with a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.embed.weight.matrix_view = Role.EMBEDDING  # type: ignore[assignment]
        self.norm = torch.nn.LayerNorm(4)
        self.hidden = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.head(self.norm(torch.relu(self.hidden(self.embed(tokens)))))


def _optimizers(routing: Routing) -> dict[str, str]:
    return {name: entry.spec.optimizer for name, entry in routing.params.items()}


def test_what_the_optimizer_refuses_goes_to_its_fallback_with_the_reason():
    """Only the hidden matrix is stepped whole; the reason says why the others are not."""
    routing = route(OptimizerConfig(optimizer="whole", lr=0.1), Model())
    assert [name for name, chosen in _optimizers(routing).items() if chosen == "whole"] == ["hidden.weight"]
    assert routing.params["embed.weight"].reason == "attribute matrix_view; not for whole: not a matrix"
    assert routing.params["head.weight"].decision.role is Role.OUTPUT
    assert [child.optimizer for child in routing.children] == ["whole", "plain"]


def test_the_configuration_decides_on_a_fallback_once_for_all_parameters():
    """A model has many parameters: what depends on the configuration alone is not asked again for each."""
    asked = []

    class Counting:
        megaopt_api = "1"

        @hookimpl
        def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
            return {
                "counting": OptimizerEntry(
                    torch.optim.SGD,
                    granularity_for=lambda config: asked.append("granularity") or Granularity.TENSOR,
                    accepts=lambda spec, view: None if view is not None else "not a matrix",
                    fallback=lambda config: asked.append("fallback") or "plain",
                )
            }

    with temporary_plugin(Counting()):
        small = route(OptimizerConfig(optimizer="counting", lr=0.1), Model())
        few = Counter(asked)
        asked.clear()
        large = route(
            OptimizerConfig(optimizer="counting", lr=0.1), torch.nn.ModuleList([Model() for _ in range(5)])
        )
    assert _optimizers(small)["embed.weight"] == _optimizers(large)["0.embed.weight"] == "plain"
    assert len(large.params) == 5 * len(small.params)
    assert Counter(asked) <= few
    assert few["fallback"] == 1


def test_groups_have_every_key_and_take_effect_at_once():
    """Group settings are there before any scheduler: lr, weight decay and the defaults of the rest."""
    config = OptimizerConfig(optimizer="plain", lr=0.1, min_lr=0.01, weight_decay=0.2)
    routing = route(config, Model(), {ParamKey(name="head.*"): {"max_lr": 0.5, "wd_mult": 0.5}})
    common = {"is_expert_parallel": False, "lr_mult": 1.0, "is_decoupled_lr": False, "min_lr": 0.01}
    assert [dict(group.values) for group in routing.groups] == [
        {**common, "default_config": True, "wd_mult": 1.0, "max_lr": 0.1, "lr": 0.1, "weight_decay": 0.2},
        {**common, "default_config": False, "wd_mult": 0.5, "max_lr": 0.5, "lr": 0.5, "weight_decay": 0.1},
    ]
    assert routing.names_of(1) == ("head.weight",)


def test_standard_overrides_apply_unless_others_are_given():
    """None means the standard ones, {} none."""
    config = OptimizerConfig(optimizer="plain", lr=0.1)
    standard, none = route(config, Model()), route(config, Model(), {})
    assert {name for name, entry in standard.params.items() if entry.override.get("wd_mult") == 0.0} == {
        "norm.weight",
        "norm.bias",
        "hidden.bias",
    }
    assert all(not entry.override for entry in none.params.values())


def test_qk_layernorm_decays_when_asked():
    """With apply_wd_to_qk_layernorm, query and key norms keep their weight decay; other vectors do not."""
    model = torch.nn.ModuleDict(
        {name: torch.nn.LayerNorm(2) for name in ("q_layernorm", "k_layernorm", "norm")}
    )
    routing = route(OptimizerConfig(optimizer="plain", lr=0.1, apply_wd_to_qk_layernorm=True), model)
    assert [name for name, entry in routing.params.items() if entry.override] == ["norm.weight", "norm.bias"]


def test_decoupled_learning_rate_reaches_embedding_and_head():
    """Both rates go to the first and last layer, by role."""
    config = OptimizerConfig(optimizer="plain", lr=0.1, min_lr=0.0, decoupled_lr=0.3, decoupled_min_lr=0.2)
    routing = route(config, Model())
    decoupled = {name: entry.override for name, entry in routing.params.items() if "max_lr" in entry.override}
    expected = {"max_lr": 0.3, "min_lr": 0.2}
    assert decoupled == {"embed.weight": expected, "head.weight": expected}


def test_mup_scales_hidden_matrices_and_leaves_a_decoupled_rate_alone():
    """The default rule divides lr and min_lr by the width; embeddings and heads keep the decoupled rate."""
    config = OptimizerConfig(optimizer="plain", lr=0.4, min_lr=0.04, decoupled_lr=0.3)
    overrides = {**get_standard_config_overrides(config), **get_mup_config_overrides(config, 4.0)}
    routing = route(config, Model(), overrides)
    assert routing.params["hidden.weight"].override == {"max_lr": 0.1, "min_lr": 0.01}
    assert routing.params["head.weight"].override == {"max_lr": 0.3}
    plain = OptimizerConfig(optimizer="plain", lr=0.4)
    head = route(plain, Model(), get_mup_config_overrides(plain, 4.0)).params["head.weight"]
    assert head.override == {"max_lr": 0.1}
    with pytest.raises(ConfigurationError, match=r"^mup_width_mult=0: must be positive$"):
        get_mup_config_overrides(config, 0)


@pytest.mark.parametrize("decay", [{}, {"apply_wd_to_qk_layernorm": True}])
@pytest.mark.parametrize("own", [{}, {ParamKey(name="0.weight"): {"max_lr": 0.5}}])
def test_standard_overrides_may_be_handed_over_for_a_model_without_biases(decay, own) -> None:
    """Callers extend what `get_standard_config_overrides` returns; its keys need not match anything."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.RMSNorm(4))
    config = OptimizerConfig(optimizer="plain", lr=0.1, weight_decay=0.1, **decay)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routing = route(config, model, {**get_standard_config_overrides(config), **own})
    assert dict(routing.params["1.weight"].override) == {"wd_mult": 0.0}
    assert dict(routing.params["0.weight"].override) == dict(*own.values())


def test_an_override_chooses_the_optimizer_and_constructor_settings_make_a_separate_one():
    """`optimizer` moves parameters; a constructor setting that groups do not keep makes a second optimizer."""
    config = OptimizerConfig(optimizer="plain", lr=0.1)
    overrides = {
        ParamKey(name="hidden.weight"): {"optimizer": "whole", "rate": 0.25},
        ParamKey(name="norm.*"): {"momentum": 0.5},
    }
    routing = route(config, Model(), overrides)
    assert [(child.optimizer, dict(child.settings), child.groups) for child in routing.children] == [
        ("plain", {}, (0, 1)),
        ("whole", {"rate": 0.25}, (2,)),
    ]
    assert routing.params["norm.weight"].spec.group == 1
    assert routing.params["hidden.weight"].reason.endswith("asks for 'whole'")


def test_expert_parameters_have_an_optimizer_of_their_own():
    """`allreduce=False` marks an expert; dense comes before expert."""
    model = Model()
    model.hidden.weight.allreduce = False
    routing = route(OptimizerConfig(optimizer="plain", lr=0.1), model, {})
    assert [child.is_expert for child in routing.children] == [False, True]
    assert routing.names_of(1) == ("hidden.weight",)
    assert routing.groups[1].values["is_expert_parallel"] is True


def test_frozen_parameters_are_listed_and_not_routed():
    """A frozen parameter has no group; a pattern that matches only it is still no mistake."""
    model = Model()
    model.embed.weight.requires_grad_(False)
    routing = route(
        OptimizerConfig(optimizer="plain", lr=0.1), model, {ParamKey(name="embed.*"): {"max_lr": 1.0}}
    )
    assert "embed.weight" not in routing.params
    assert routing.frozen == ("embed.weight",)


def test_tied_parameters_are_one_and_match_under_every_name():
    """A tied head is routed once, and a pattern for either name reaches it."""
    model = Model()
    model.head.weight = model.embed.weight
    routing = route(
        OptimizerConfig(optimizer="plain", lr=0.1), model, {ParamKey(name="head.*"): {"max_lr": 1.0}}
    )
    assert routing.params["embed.weight"].aliases == ("head.weight",)
    assert routing.params["embed.weight"].override == {"max_lr": 1.0}
    assert "head.weight" not in routing.params


def test_a_model_on_meta_is_routed_alike():
    """No parameter is read."""
    with torch.device("meta"):
        meta = Model()
    config = OptimizerConfig(optimizer="whole", lr=0.1)
    assert route(config, meta) == route(config, Model())


def test_routing_survives_what_people_do_to_models():
    """deepcopy, to_empty, torch.compile, DataParallel and checkpoint wrappers change nothing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    config = OptimizerConfig(optimizer="whole", lr=0.1)
    expected = route(config, Model())
    wrapped = Model()
    wrapped.hidden = checkpoint_wrapper(wrapped.hidden)
    for model in (
        copy.deepcopy(Model()),
        Model().to("meta").to_empty(device="cpu"),
        torch.compile(Model()),
        torch.nn.DataParallel(Model()),
        wrapped,
    ):
        assert _optimizers(route(config, model)) == _optimizers(expected)


def test_a_changed_routing_names_the_parameters():
    """require_same raises for whoever would now go elsewhere."""
    config = OptimizerConfig(optimizer="plain", lr=0.1)
    before = route(config, Model(), {})
    before.require_same(route(config, Model(), {}))
    with pytest.raises(RoutingChangedError) as caught:
        before.require_same(route(config, Model(), {ParamKey(name="head.*"): {"max_lr": 1.0}}))
    assert caught.value.names == ("head.weight",)
    assert "change the routing of 1 parameters since the model was wrapped: head.weight." in str(caught.value)


def test_annotations_of_plugins_decide_what_is_left_open():
    """A plugin's role wins over inference; an attribute on the parameter wins over the plugin."""

    class Annotates:
        megaopt_api = "1"

        @hookimpl
        def megaopt_annotate_params(self, model_chunk):
            return {"hidden.weight": Role.ELEMENTWISE, "embed.weight": MatrixView()}

        @hookimpl
        def megaopt_param_overrides(self, config, model_chunks):
            return {ParamKey(name="norm.*"): {"max_lr": 0.7}}

    with temporary_plugin(Annotates(), name="annotates"):
        model = Model()
        del model.embed.weight.matrix_view
        routing = route(OptimizerConfig(optimizer="whole", lr=0.1), model, {})
        model.hidden.weight.use_muon = True
        explicit = route(OptimizerConfig(optimizer="whole", lr=0.1), model, {})
    assert _optimizers(routing)["hidden.weight"] == "plain"
    assert _optimizers(routing)["embed.weight"] == "whole"
    assert routing.params["norm.bias"].matched == ("plugin annotates name 'norm.*': max_lr=0.7",)
    assert _optimizers(explicit)["hidden.weight"] == "whole"


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            {ParamKey(name="hiden.weight"): {"max_lr": 1.0}},
            UnmatchedKeyError,
            "config_overrides: the name pattern 'hiden.weight' matches no parameter on any rank; close names: "
            "hidden.weight, head.weight, norm.weight. Run `megaopt explain` to see every name",
        ),
        (
            {ParamKey(name="head.*"): {"wd_mlt": 0.0}},
            OverrideError,
            "config_overrides: ParamKey(name=('head.*',)): 'wd_mlt' is no setting of optimizer 'plain', which steps "
            "'head.weight'; did you mean 'wd_mult'? Allowed are ",
        ),
        (
            {ParamKey(name="head.*"): {"max_lr": 1.0}, ParamKey(name="*.weight"): {"max_lr": 2.0}},
            OverrideConflictError,
            "conflicting overrides for parameter 'head.weight': 'max_lr' is 1.0 from config_overrides: "
            "ParamKey(name=('head.*',)) and 2.0 from config_overrides: ParamKey(name=('*.weight',))",
        ),
        (
            {ParamKey(name="embed.*"): {"optimizer": "whole"}},
            RoutingError,
            "config_overrides: ParamKey(name=('embed.*',)) sends 'embed.weight' (shape (7, 4)) to 'whole', which does "
            "not take it: not a matrix. Set its matrix_view, or send it to another optimizer",
        ),
        (
            {"head.*": {}},
            OverrideError,
            "config_overrides: the key of an override is a ParamKey, got 'head.*': write ParamKey(name='head.*')",
        ),
        (
            [1],
            OverrideError,
            "config_overrides: overrides are a mapping {ParamKey: ParamGroupOverride}, got list: [1]",
        ),
        (
            {ParamKey(name="head.*"): OptimizerConfig(optimizer="plain")},
            OverrideError,
            "an override is a ParamGroupOverride (a dict), got OptimizerConfig: OptimizerConfig(optimizer='plain')",
        ),
        (
            {ParamKey(name="*"): {"min_lr": 0.5}},
            ConfigurationError,
            "a group of 'plain' has min_lr=0.5 above max_lr=0.1; set both in the override",
        ),
    ],
)
def test_mistakes_are_named(overrides, error, message):
    """Every error says who, what was given and what to do."""
    with pytest.raises(error) as caught:
        route(OptimizerConfig(optimizer="plain", lr=0.1), Model(), overrides)
    assert str(caught.value).startswith(message)


def test_an_optimizer_without_fallback_names_the_parameter_it_leaves():
    """Nobody takes the embedding: the error shows the override to write."""
    with pytest.raises(RoutingError) as caught:
        route(OptimizerConfig(optimizer="picky", lr=0.1), Model(), {})
    assert str(caught.value) == (
        "'picky' does not take 'embed.weight' (shape (7, 4)): not a matrix; it has no fallback. "
        'Give an override such as {ParamKey(name="embed.weight"): {"optimizer": ...}}'
    )


def test_a_predicate_that_matches_nothing_is_warned_of():
    """Attributes and predicates may be meant for other models: a warning is enough."""
    never = ParamPredicate(name="never", fn=lambda param: False)
    with pytest.warns(
        UserWarning, match=r"the override key ParamKey\(predicate=\('never',\)\) matches no parameter"
    ):
        route(
            OptimizerConfig(optimizer="plain", lr=0.1), Model(), {ParamKey(predicate=never): {"max_lr": 1.0}}
        )


def test_two_chunks_with_one_name_need_fqn():
    """Names must be unique over chunks; fqn= makes them so."""
    config = OptimizerConfig(optimizer="plain", lr=0.1)
    chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    with pytest.raises(
        RoutingError, match=r"model chunks 0 and 1 both have a parameter 'weight'\. Give models .*pass fqn="
    ):
        route(config, chunks)
    routing = route(config, chunks, fqn=lambda chunk, name: f"layers.{chunk}.{name}")
    assert list(routing.params) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]


def test_a_strategy_that_cannot_shard_an_optimizer_is_refused():
    """An unknown strategy names the known ones."""
    with pytest.raises(LookupError, match="replicated"):
        route(OptimizerConfig(optimizer="plain", lr=0.1, sharding="replicatd"), Model())


@frozen
class Fallback(Replicated):
    """Replicates what has some granularities, and sends the rest elsewhere."""

    fallback: str | None = None


class TwoStrategies:
    """A strategy of whole tensors, and one of elements; each sends what it does not take to the other."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        return {
            "matrices": Fallback("matrices", frozenset({Granularity.TENSOR}), "elements"),
            "elements": Fallback("elements", frozenset({Granularity.ELEMENT}), "matrices"),
        }


def test_only_what_must_stay_whole_is_sent_elsewhere_with_a_warning():
    """Once, however many groups there are; elements go to the fallback of a strategy of matrices by design."""
    overrides = {
        ParamKey(name="*bias"): {"wd_mult": 0.0},
        ParamKey(name="hidden.weight"): {"lr": 0.2},
    }
    with temporary_plugin(TwoStrategies()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = route(OptimizerConfig(optimizer="plain", lr=0.1, sharding="matrices"), Model(), overrides)
        assert {entry.strategy for entry in plain.params.values()} == {"elements"}
        assert [str(warning.message) for warning in caught] == []
        routing = route(OptimizerConfig(optimizer="whole", lr=0.1, sharding="elements"), Model(), overrides)
    sent = {entry.strategy for entry in routing.params.values() if entry.spec.optimizer == "whole"}
    assert sent == {"matrices"}
    assert [str(warning.message) for warning in caught] == [
        "'whole' steps whole tensors: it is sharded with 'matrices', not with 'elements'"
    ]


OVERRIDE_TUPLES = st.none() | st.dictionaries(
    st.sampled_from(["max_lr", "wd_mult", "eps"]), st.floats(0, 1) | st.integers(0, 3), min_size=1
).map(lambda override: tuple(sorted(override.items())))
KEYS = st.builds(
    GroupKey,
    st.sampled_from(["whole", "plain"]),
    st.booleans(),
    st.sampled_from([(), (("rate", 0.5),)]),
    OVERRIDE_TUPLES,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(KEYS, max_size=8), st.randoms(use_true_random=False), st.integers(1, 4))
def test_four_pipeline_ranks_agree_on_one_order(keys, random, ranks):
    """Whatever keys each rank found, the union has one order, primary first, None first within an optimizer."""
    shares = [[] for _ in range(ranks)]
    for key in keys:
        shares[random.randrange(ranks)].append(key)
    orders = []
    for _ in range(ranks):
        random.shuffle(shares)
        orders.append(order_children((key for share in shares for key in share), "plain"))
    assert all(order == orders[0] for order in orders)
    optimizers = [key.optimizer for key in orders[0]]
    assert optimizers == sorted(optimizers, key=lambda name: (name != "plain", name))
    for earlier, later in zip(orders[0], orders[0][1:], strict=False):
        if earlier.child == later.child:
            assert later.override is not None


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_the_order_of_parameters_does_not_matter(random):
    """Resolution is the same for every order in which modules were registered."""
    names = ["embed", "norm", "hidden", "head"]
    random.shuffle(names)
    model, shuffled = Model(), torch.nn.Module()
    shuffled.__class__ = Model
    for name in names:
        shuffled.add_module(name, getattr(model, name))
    config = OptimizerConfig(optimizer="whole", lr=0.1)
    one, other = route(config, model), route(config, shuffled)
    assert one.groups == other.groups
    assert one.children == other.children
    assert dict(one.params) == dict(other.params)


def test_an_empty_override_makes_no_group_and_one_that_names_the_optimizer_does():
    """A group's key is the sorted override, and None where there is none."""
    config = OptimizerConfig(optimizer="plain", lr=0.1)
    for override, groups in (({}, 1), ({"optimizer": "plain"}, 2)):
        routing = route(config, Model(), {ParamKey(name="hidden.weight"): override})
        assert len(routing.groups) == groups
        assert {child.optimizer for child in routing.children} == {"plain"}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weigth_decay", "; did you mean 'weight_decay'?"),
        ("zzz", "."),
    ],
)
def test_a_key_that_is_misspelt_is_told_as_it_is_called(key, meant):
    """Where a known one is close."""
    with pytest.raises(OverrideError) as caught:
        route(OptimizerConfig(optimizer="plain", lr=0.1), Model(), {ParamKey(name="head.*"): {key: 1.0}})
    assert f", which steps 'head.weight'{meant} Allowed are " in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, torch.nn.Linear(2, 2)), "config: got NoneType, not an OptimizerConfig"),
        (("muon", torch.nn.Linear(2, 2)), "config: got str, not an OptimizerConfig"),
        (
            (torch.nn.Linear(2, 2), OptimizerConfig()),
            "config: got Linear, not an OptimizerConfig; the configuration comes",
        ),
    ],
)
def test_the_configuration_comes_first(arguments, message):
    """As for the builders."""
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        route(*arguments)


def test_one_model_twice_is_named():
    """A list is for chunks; nothing is stepped twice."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RoutingError, match=r"both have a parameter 'weight': they are the same module\. "):
        route(OptimizerConfig(optimizer="plain", lr=0.1), [model, model])
