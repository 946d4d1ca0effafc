"""What the tests of single sources share."""

import pytest
from megaopt_bridge.recipes import recipe_of

from megaopt_core.errors import ConformanceError

__all__ = ["make"]


def make(check):
    """Make a check, which has to fail where the class's recipe says that it does."""
    why = recipe_of(*check.optimizer.split(":")).fails.get(check.check.id)
    if why is None:
        check()
        return
    with pytest.raises(ConformanceError):
        check()
