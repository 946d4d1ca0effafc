"""What a class keeps in attributes is found out by trying, and the report says what does not happen for it."""

import keeping_apart
import made_up
import pytest
import torch
from megaopt_bridge import probe

from megaopt_core import build_optimizer

pytest.importorskip("megaopt_adam")
pytestmark = pytest.mark.any_python

APART = "its class keeps something that is neither in its state nor in its groups"


@pytest.mark.parametrize(
    ("cls", "unread"),
    [
        (keeping_apart.Base, {"weight_decay"}),
        (keeping_apart.KeepsItsRate, {"lr", "weight_decay"}),
        (keeping_apart.KeepsItsDecay, {"weight_decay"}),
        (keeping_apart.DecaysByItsGroup, set()),
        (torch.optim.AdamW, set()),
        (torch.optim.Rprop, {"weight_decay"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_class_reads_of_its_groups(cls, unread) -> None:
    """Whatever its constructor takes."""
    assert probe(cls, {"lr": 1e-2}).unread == unread


@pytest.mark.parametrize(
    ("cls", "resumes"),
    [
        (keeping_apart.Base, True),
        (keeping_apart.KeepsItsMomentum, False),
        (keeping_apart.WarmsUpByItself, False),
        (made_up.Plain, True),
        (made_up.CountsInGroups, True),
        (made_up.Noisy, False),
        (torch.optim.NAdam, True),
        (torch.optim.ASGD, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_whether_state_and_groups_are_all_that_a_run_needs(cls, resumes) -> None:
    """A new object is given them, and compared bit for bit."""
    assert probe(cls, {"lr": 1e-2}).resumes is resumes


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Base", "its class has no argument for it"),
        ("KeepsItsRate", "the learning rate of its group changed nothing in a trial"),
        ("KeepsItsDecay", "its class has the configuration's, if any"),
        ("KeepsItsMomentum", f"does not resume exactly: {APART}"),
        ("WarmsUpByItself", f"does not resume exactly: {APART}"),
    ],
)
def test_the_report_says_what_does_not_happen(name, told) -> None:
    """For each parameter, beside the number that it is given."""
    built = build_optimizer(torch.nn.Linear(4, 3), f"keeping_apart:{name}", lr=0.1, weight_decay=0.2)
    notes = {row.name: row.note for row in built.report().params}
    assert told in notes["weight"]
    assert "no argument" not in notes["bias"]  # no weight decay is shown for it


def test_nothing_is_noted_of_a_class_that_does_it_all() -> None:
    """The rest of the report stays as short as it was."""
    built = build_optimizer(torch.nn.Linear(4, 3), "torch:NAdam", lr=0.1, weight_decay=0.2)
    assert not any(row.note for row in built.report().params)
