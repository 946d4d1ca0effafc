"""Matrix views that users register for module types or predicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from attrs import frozen
from torch import nn

from megaopt_core.errors import ViewError
from megaopt_core.params._views import MatrixView

__all__ = ["ViewHandle", "register_matrix_view", "registered_view"]

type ModuleMatch = type[nn.Module] | Callable[[nn.Module], bool]
type ViewSource = MatrixView | Callable[[nn.Module], MatrixView | None]


@frozen(eq=False)
class ViewHandle:
    """A registered view; `remove` takes it back.

    Args:
        match: the module type or predicate.
        view: the view or the function that makes it from a module.
        param: the attribute of the module that it describes.
    """

    match: ModuleMatch
    view: ViewSource
    param: str

    def remove(self) -> None:
        """Take the registration back; doing it twice is harmless."""
        if self in _registered:
            _registered.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return f"register_matrix_view({getattr(self.match, '__name__', self.match)}, param={self.param!r})"

    def view_of(self, module: nn.Module, attribute: str) -> MatrixView | None:
        """Return the view of a module's parameter, None when this registration does not speak of it.

        Args:
            module: the owner of the parameter.
            attribute: the attribute that holds it.
        """
        if attribute != self.param:
            return None
        matched = isinstance(module, self.match) if isinstance(self.match, type) else self.match(module)
        if not matched:
            return None
        return self.view if isinstance(self.view, MatrixView) else self.view(module)


_registered: list[ViewHandle] = []


def register_matrix_view(match: ModuleMatch, view: ViewSource, *, param: str = "weight") -> ViewHandle:
    """Say how the parameters of a module type are seen as matrices.

    Args:
        match: a module class (subclasses included), or a predicate of a module.
        view: the view, or a function that makes it from the module; a function may return None for a module that
            it does not want to describe.
        param: the attribute of the module that holds the parameter.

    Returns:
        A handle whose `remove()` takes the registration back; it works as a context manager too.

    Raises:
        ViewError: `match` or `view` is of another type.

    Example:
        >>> import torch
        >>> from megaopt_core.routing import infer_roles, register_matrix_view
        >>> class Fused(torch.nn.Linear):
        ...     pass
        >>> with register_matrix_view(Fused, MatrixView(split_sizes=(8, 8), label="gate_up")):
        ...     str(infer_roles(Fused(4, 16, bias=False))["weight"].view)
        'MatrixView(gate_up: split rows (8, 8))'
    """
    if not callable(match):
        raise ViewError(f"register_matrix_view: match must be a module class or a predicate, got {match!r}")
    if not isinstance(view, MatrixView) and not callable(view):
        raise ViewError(
            f"register_matrix_view: view must be a MatrixView or a function of a module, got {view!r}"
        )
    handle = ViewHandle(match, view, param)
    _registered.append(handle)
    return handle


def registered_view(name: str, module: nn.Module, attribute: str) -> tuple[MatrixView, ViewHandle] | None:
    """Return what users registered for a module's parameter.

    Args:
        name: the parameter's canonical name, for errors.
        module: its owner.
        attribute: the attribute that holds it.

    Raises:
        ViewError: two registrations describe it differently.
    """
    found: tuple[MatrixView, ViewHandle] | None = None
    for handle in _registered:
        view = handle.view_of(module, attribute)
        if view is None:
            continue
        if found is not None and found[0] != view:
            raise ViewError(
                f"{name}: two registrations describe it: {found[1]} says {found[0]}, {handle} says {view}; "
                "remove one of them"
            )
        found = found or (view, handle)
    return found
