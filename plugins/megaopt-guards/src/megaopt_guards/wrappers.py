"""The observer of wrappers: a model that is wrapped after its optimizer was built reduces other gradients."""

from __future__ import annotations

from weakref import WeakSet

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import OwnershipError
from megaopt_core.plugin_api import StepObserver
from megaopt_core.reporting import WatchedModel
from megaopt_core.routing import require_same_ranks
from megaopt_core.sharding import WrappedModel, known_wrappers, wrappers_of

__all__ = ["WrappersWatched"]


class WrappersWatched(StepObserver):
    """Compares the wrappers that a model has now with those that its optimizer was built for; it keeps none alive.

    A wrapper that all-reduces whole gradients may come later, as long as it does so over the ranks of the build. One
    that scatters them also decides where parameters lie and who steps what: the build has to know it.

    Args:
        optimizer: what is stepped.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._pgs = optimizer.process_groups
        self._known: WeakSet[WrappedModel] = WeakSet()
        self._scatters: dict[WatchedModel, bool] = {}
        for model in (each.watched_model for each in (optimizer, *optimizer.children)):
            found = wrappers_of(model.alive())
            self._known.update(found)
            self._scatters[model] = any(wrapper.scatters_grads for wrapper in found)

    def before_step(self) -> None:
        """Look at the model, and take new wrappers for known.

        Raises:
            MegaoptError: the gradients that a new wrapper reduces are not those that are stepped.
        """
        for model, scattered in self._scatters.items():
            self._look(model, scattered=scattered)

    def _look(self, model: WatchedModel, *, scattered: bool) -> None:
        for index, reference in enumerate(model.chunks):
            for wrapper in (found.wrapper for found in known_wrappers(reference())):
                if wrapper not in self._known:
                    _require_whole_grads(index, wrapper, scattered=scattered)
                    require_same_ranks(index, wrapper, self._pgs)
                    self._known.add(wrapper)


def _require_whole_grads(index: int, wrapper: WrappedModel, *, scattered: bool) -> None:
    if wrapper.scatters_grads or scattered:
        whose = "scatters gradients over ranks" if wrapper.scatters_grads else "has other gradient buffers"
        raise OwnershipError(
            f"model chunk {index} was wrapped in {type(wrapper).__name__} after the optimizer was built, and "
            f"it {whose}: the optimizer steps other parts than the wrapper reduces. Wrap the model first, "
            "and build the optimizer for the wrapper"
        )
