"""One forward that is watched: what becomes of every parameter."""

from megaopt_roles.watch._notes import Contraction, Notes, Use
from megaopt_roles.watch._run import Watched, watch
from megaopt_roles.watch._values import Met, Run

__all__ = ["Contraction", "Met", "Notes", "Run", "Use", "Watched", "watch"]
