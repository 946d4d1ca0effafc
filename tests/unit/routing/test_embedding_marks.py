"""Marks of embeddings and outputs: a table is an embedding, whose learning rate muP leaves alone."""

import pytest
import torch
from torch import nn

from megaopt_core import OptimizerConfig, get_mup_config_overrides, get_standard_config_overrides, route
from megaopt_core.errors import ViewError
from megaopt_core.params import Role
from megaopt_core.routing import infer_roles


class VocabParallelEmbedding(nn.Module):
    """A table of a class of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 4))


class Model(nn.Module):
    """Tables of two kinds and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab, self.words = VocabParallelEmbedding(), nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)


class ModelWithBareTable(Model):
    """And a table without a module, of which nothing is known where no reader of models is installed."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.zeros(7, 4))


NAMES = ("vocab.weight", "words.weight", "bare", "head.weight")


def roles(model: nn.Module, **marks: bool) -> dict[str, Role]:
    """Return the roles after every parameter was given these attributes."""
    for param in model.parameters():
        for mark, value in marks.items():
            setattr(param, mark, value)
    found = infer_roles(model)
    return {name: found[name].role for name in NAMES if name in found}


E, O = Role.EMBEDDING, Role.OUTPUT  # noqa: E741 - a table of one-letter roles reads best


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"is_embedding_or_output_parameter": True}, (E, E, O, O)),  # of a bare table nobody has seen the use
        ({"is_embedding_parameter": True}, (E, E, E, E)),
        ({"is_embedding_parameter": True, "is_embedding_or_output_parameter": True}, (E, E, E, E)),
        ({"is_embedding_parameter": False, "is_embedding_or_output_parameter": True}, (O, O, O, O)),
    ],
)
def test_marks_say_which_of_the_two_it_is(marks, expected):
    """The mark of both leaves it to the module; the mark of embeddings decides, True or False."""
    assert roles(ModelWithBareTable(), **marks) == dict(zip(NAMES, expected, strict=True))


@pytest.mark.parametrize("mark", ["is_embedding_parameter", "is_embedding_or_output_parameter"])
def test_a_table_that_is_said_to_be_no_embedding_is_element_wise(mark):
    """No optimizer for matrices takes it."""
    assert roles(Model(), **{mark: False})["words.weight"] is Role.ELEMENTWISE


def test_a_bias_is_no_table():
    """All parameters of an embedding module may be marked; one with a single dimension has no rows to look up."""
    model = nn.Linear(4, 7)
    model.bias.is_embedding_parameter = True
    assert infer_roles(model)["bias"].role is Role.ELEMENTWISE


@pytest.mark.parametrize("mark", ["is_embedding_parameter", "is_embedding_or_output_parameter"])
def test_a_mark_and_use_muon_contradict_each_other(mark):
    """Both say what it is."""
    model = Model()
    setattr(model.vocab.weight, mark, True)
    model.vocab.weight.use_muon = True
    with pytest.raises(
        ViewError, match=rf"^vocab.weight: two descriptions contradict .* attribute {mark} says"
    ):
        infer_roles(model)


@pytest.mark.parametrize("mark", ["is_embedding_parameter", "is_embedding_or_output_parameter"])
@pytest.mark.parametrize("optimizer", ["plain", "sgd"])
def test_mup_scales_the_learning_rate_of_no_embedding(mark, optimizer):
    """Marked tables keep it; under SGD they are vector-like."""
    if optimizer == "sgd":
        pytest.importorskip("megaopt_adam")
    model = Model()
    for param in (model.vocab.weight, model.words.weight):
        setattr(param, mark, True)
    model.head.weight.is_embedding_or_output_parameter = True
    mup = get_mup_config_overrides(OptimizerConfig(optimizer=optimizer, lr=0.4), 4.0)
    routed = route(OptimizerConfig(optimizer="plain", lr=0.4), model, mup).params
    lr = {name: routed[name].override.get("max_lr", 0.4) for name in NAMES if name in routed}
    embedding, head = (1.6, 0.4) if optimizer == "sgd" else (0.4, 0.1)
    assert lr == {"vocab.weight": embedding, "words.weight": embedding, "head.weight": head}


@pytest.mark.parametrize("mark", ["is_embedding_parameter", "is_embedding_or_output_parameter"])
def test_a_marked_table_has_the_decoupled_learning_rate(mark):
    """It is one of the two, whichever mark says so."""
    model = Model()
    setattr(model.vocab.weight, mark, True)
    model.head.weight.is_embedding_or_output_parameter = True
    model.words.weight.matrix_view = Role.ELEMENTWISE
    config = OptimizerConfig(optimizer="plain", lr=0.4, decoupled_lr=0.3)
    routed = route(config, model, get_standard_config_overrides(config)).params
    assert routed["vocab.weight"].override == {"max_lr": 0.3}
