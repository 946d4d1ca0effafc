"""State that is computed when it is read: writing into it raises, since nothing would come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from megaopt_core.errors import UnsupportedOperationError

__all__ = ["ComputedState"]


class ComputedState(torch.Tensor):
    """Values of a state that is stored in codes, or in several pieces; what is written into them raises.

    A view of it is one too; whatever else torch computes from it, a copy and a pickle of it are plain tensors.

    Example:
        >>> ComputedState.of(torch.ones(2), "exp_avg", "up.weight").zero_()
        Traceback (most recent call last):
        megaopt_core.errors.UnsupportedOperationError: optimizer.state[p]['exp_avg'] of 'up.weight' is a computed \
copy, so a write into it is lost; assign optimizer.state[p]['exp_avg'] = value
    """

    _of: tuple[str, str]
    _version_read: int

    @classmethod
    def of(cls, values: torch.Tensor, key: str, name: str) -> Self:
        """Return computed values that cannot be written.

        Args:
            values: what was computed; its memory is shared.
            key: the state's key.
            name: the parameter's name.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
            # A tensor of inference mode counts no writes.
            found = (values.clone() if values.is_inference() else values.detach()).as_subclass(cls)
            found._of, found._version_read = (key, name), found._version
            return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what torch's function returns, unless it has written."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
            for each in read:
                if each._version != each._version_read:
                    key, name = each._of
                    raise UnsupportedOperationError(
                        f"optimizer.state[p][{key!r}] of {name!r} is a computed copy, so a write into it is "
                        f"lost; assign optimizer.state[p][{key!r}] = value"
                    )
            memory = {each.untyped_storage().data_ptr(): each._of for each in read}

            def protect(value: Any) -> Any:
                if type(value) is not torch.Tensor or value.layout is not torch.strided:
                    return value
                found = memory.get(value.untyped_storage().data_ptr())
                return value if found is None else cls.of(value, *found)

            return tree_map(protect, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_plain()

    def as_plain(self) -> torch.Tensor:
        """Return the values as a tensor of its own memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()
