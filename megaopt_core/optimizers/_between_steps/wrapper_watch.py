"""A look before every step at who reduces the model's gradients: it may have been wrapped after the build."""

from __future__ import annotations

from weakref import WeakSet

from attrs import define, field

from megaopt_core.errors import MegaoptError, OwnershipError, ParallelGroupError
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.reporting._watched_model import WatchedModel
from megaopt_core.routing._wrapped_model import require_same_ranks
from megaopt_core.sharding._wrapped import WrappedModel, known_wrappers, wrappers_of

__all__ = ["WrapperWatch"]


@define(eq=False)
class WrapperWatch:
    """Compares the wrappers that a model has now with those that its optimizer was built for; it keeps none alive.

    One that all-reduces whole gradients may come later, as long as it does so over the ranks of the build. One that
    scatters them also decides where parameters lie and who steps what: the build has to know it.

    Args:
        model: the model that the optimizer was built for.
        pgs: the process groups of the build.
    """

    model: WatchedModel
    pgs: ProcessGroupCollection
    _known: WeakSet[WrappedModel] = field(init=False)
    _scattered: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        found = wrappers_of(self.model.alive())
        self._known = WeakSet(found)
        self._scattered = any(wrapper.scatters_grads for wrapper in found)

    def settle(self) -> MegaoptError | None:
        """Look at the model.

        Returns:
            Why the gradients that a new wrapper reduces are not those that are stepped; None where they are.
        """
        for index, reference in enumerate(self.model.chunks):
            for wrapper in (found.wrapper for found in known_wrappers(reference())):
                if wrapper not in self._known:
                    error = self._error(index, wrapper)
                    if error is not None:
                        return error
                    self._known.add(wrapper)
        return None

    def _error(self, index: int, wrapper: WrappedModel) -> MegaoptError | None:
        kind = type(wrapper).__name__
        if wrapper.scatters_grads or self._scattered:
            whose = (
                "scatters gradients over ranks" if wrapper.scatters_grads else "has other gradient buffers"
            )
            return OwnershipError(
                f"model chunk {index} was wrapped in {kind} after the optimizer was built, and it {whose}: "
                "what is stepped here is not what it reduces. Wrap the model first, and build the optimizer for the "
                "wrapper"
            )
        try:
            require_same_ranks(index, wrapper, self.pgs)
        except ParallelGroupError as error:
            return error
        return None
