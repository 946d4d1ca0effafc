"""What a load did: which names came from the checkpoint, which did not, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from megaopt_core.params import shown

__all__ = ["LoadReport"]


@define
class LoadReport:
    """What a load did, the same on every rank.

    Args:
        loaded: parameters whose state was loaded.
        missing: what is here but not in the checkpoint; it stays as it was.
        unexpected: what is in the checkpoint but not here; it was left.
        reset: parameter to the reason why its optimizer state starts anew.
        renamed: name here to name in the checkpoint, where they differ.
        converted: parameter to what became of its precision, such as `"bfloat16 -> float32"`.
        settings: group settings for which the configuration's value was kept although the checkpoint has another, as
            `"group 0: lr"` to `(configured, in the checkpoint)`.
        extra: what was given to `save_checkpoint` as `extra`.
        world_size: number of ranks that saved.
        configuration: the configuration that saved.

    Example:
        >>> print(LoadReport(loaded=("weight",), missing=("bias",)))
        loaded the state of 1 parameters
        not in the checkpoint, left as it was: bias
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reset: dict[str, str] = field(factory=dict)
    renamed: dict[str, str] = field(factory=dict)
    converted: dict[str, str] = field(factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(factory=dict)
    extra: Any = None
    world_size: int = 1
    configuration: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        lines = [f"loaded the state of {len(self.loaded)} parameters"]
        if self.missing:
            lines.append(f"not in the checkpoint, left as it was: {shown(self.missing)}")
        if self.unexpected:
            lines.append(f"in the checkpoint, but not here: {shown(self.unexpected)}")
        lines += [f"starts anew: {name}: {reason}" for name, reason in self.reset.items()]
        lines += [f"renamed: {old} -> {name}" for name, old in self.renamed.items()]
        lines += [f"converted: {name}: {what}" for name, what in self.converted.items()]
        for name, (own, theirs) in self.settings.items():
            lines.append(f"{name} is {own!r} as configured; the checkpoint has {theirs!r}")
        return "\n".join(lines)
