"""What collectives say when they fail."""

import pytest

from megaopt_core.errors import CommunicationError, UnsupportedOperationError
from megaopt_core.parallel import needs_all_ranks


def test_a_missing_numpy_is_no_rank_that_has_stopped() -> None:
    """Objects cannot be sent without it; any other failure is that of a rank."""
    with (
        pytest.raises(UnsupportedOperationError, match=r"^agreeing failed: .* pip install numpy$"),
        needs_all_ranks("agreeing"),
    ):
        raise RuntimeError("Numpy is not available")
    with pytest.raises(CommunicationError, match="another rank has stopped"), needs_all_ranks("agreeing"):
        raise RuntimeError("Connection closed by peer")
