"""Which way each shape of matrix is iterated, chosen once and kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from megaopt_muon.choice.calibration import current_rates, current_share
from megaopt_muon.choice.half_runs import half_runs
from megaopt_muon.choice.plan_text import ONEDNN, parsed_plan, written_plan
from megaopt_muon.choice.schedule import longest_blocks, plan_blocks, whole_runs
from megaopt_muon.choice.spectrum import Spectrum
from megaopt_muon.products.onednn import is_multiplied

if TYPE_CHECKING:
    from megaopt_muon.choice.rates import Rates
    from megaopt_muon.coefficients import Coefficients

__all__ = ["MethodBook", "choose_method", "is_narrow"]

_MARGIN: Final = 0.9
"""Part of the plain iteration's time, or of torch's own products', that another must stay below to be taken."""

_SMALLEST: Final = 160
"""Rows from which on the norm of a Gram matrix can tell that no singular value stands out."""


def choose_method(
    method: str, coefficients: Coefficients, small: int, large: int, rates: Callable[[int], Rates]
) -> str:
    """Return the fastest method that is accurate for a shape.

    Args:
        method: `"standard"` and `"gram"` force one; `"auto"` chooses.
        coefficients: `(a, b, c)` of each step.
        small: the smaller dimension of the matrix.
        large: the larger one.
        rates: of operations on matrices of so many rows.
    """
    standard = (1,) * len(coefficients)
    runs = whole_runs(coefficients)
    if method == "standard" or runs == standard or small < _SMALLEST:
        return "plain"
    if method == "gram":
        return "gram"
    measured = rates(small)
    fast = measured.run_time(runs, small, large) < _MARGIN * measured.run_time(standard, small, large)
    return "gram" if fast else "plain"


type _Kind = tuple[int, int, torch.dtype, str]
"""Smaller and larger dimension of a matrix, what it is computed in, and the type of device."""


class MethodBook:
    """The methods of all shapes of one group.

    Matrices of 16 bits on a processor are decided by rates, all others by counting operations. What is already chosen
    stays under `"auto"`; a method that the user forces takes its place, with a warning where it is another.

    Args:
        method: what the user asks for.
        coefficients: `(a, b, c)` of each step.
        text: methods that are already chosen, as :attr:`text` writes them.
        rates: of operations on matrices of so many rows.
        narrow: the group's matrices are of 16 bits, on a processor.
        relaxed: float32 stands in for bfloat16.
        half: the group's matrices are iterated in float16.
        share: of the time of torch's own products in float32 that oneDNN's take, with matrices of so many rows.

    Example:
        >>> book = MethodBook("auto", ((3.4445, -4.775, 2.0315),) * 5, "512x4096:gram")
        >>> book.method_of(512, 4096), book.text
        ('gram', '512x4096:gram')
    """

    def __init__(
        self,
        method: str,
        coefficients: Coefficients,
        text: str = "",
        rates: Callable[[int], Rates] = current_rates,
        *,
        narrow: bool = True,
        relaxed: bool = False,
        half: bool = False,
        share: Callable[[int], float] = current_share,
    ) -> None:
        self._method = method
        self._rates, self._share = rates, share
        self._coefficients = coefficients
        stored = parsed_plan(text)
        self._chosen = {shape: name.removesuffix(ONEDNN) for shape, name in stored.items()}
        self._stored = {shape: name.endswith(ONEDNN) for shape, name in stored.items()}
        self._tried: set[tuple[int, int]] = set()
        self._onednn: dict[_Kind, bool] = {}
        self._may_multiply = not (narrow or half)
        if not self._may_multiply:
            for shape in [shape for shape, by_onednn in self._stored.items() if by_onednn]:
                self._do_without_onednn(shape)
                self._stored[shape] = False
        if method != "auto":
            self._force(narrow=narrow, relaxed=relaxed, half=half)
            return
        for shape, name in list(self._chosen.items()):
            if narrow and name == "gram" and whole_runs(coefficients) == (1,) * len(coefficients):
                self._give_up(shape)

    def _force(self, *, narrow: bool, relaxed: bool, half: bool) -> None:
        """Put the method that the user forces in the place of all that are stored."""
        stored, coefficients = dict(self._chosen), self._coefficients
        dtype = torch.float32 if relaxed else torch.bfloat16
        # Whether any steps are run together does not depend on the singular values.
        blocks = longest_blocks(coefficients, dtype, Spectrum.UNKNOWN, relaxed=relaxed)
        runs = self._method == "gram" and set(blocks) != {1}
        for shape in stored:
            if narrow:
                self._chosen[shape] = choose_method(self._method, coefficients, *shape, self._rates)
            elif half:
                single = set(half_runs(self._method, coefficients, *shape)) <= {1}
                self._chosen[shape] = "plain" if single else "gram"
            else:
                self._chosen[shape] = "gram" if runs else "plain"
        changed = {shape: name for shape, name in stored.items() if name != self._chosen[shape]}
        if changed:
            now, instead = written_plan(self._chosen, changed), written_plan(changed)
            warnings.warn(
                f"muon_ns_method={self._method!r} takes the place of the stored ns_plan: {now}, not {instead}",
                stacklevel=4,
            )

    def _give_up(self, shape: tuple[int, int]) -> None:
        """Say that a stored plan cannot run, and go step by step."""
        warnings.warn(
            f"Muon computes {shape[0]}x{shape[1]} step by step: its coefficients do not allow the runs of the stored "
            "ns_plan 'gram'",
            stacklevel=3,
        )
        self._chosen[shape] = "plain"

    def _do_without_onednn(self, shape: tuple[int, int]) -> None:
        """Say that products of a stored plan cannot be made here."""
        warnings.warn(
            f"Muon multiplies {shape[0]}x{shape[1]} as torch does: oneDNN, as in the stored ns_plan "
            f"'{self._chosen[shape]}{ONEDNN}', multiplies float32 on processors",
            stacklevel=3,
        )

    def onednn_of(self, small: int, large: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether oneDNN makes the products of a shape, chosen when it is first asked for.

        While a user has it disabled, it does not.

        Args:
            small: the smaller dimension of the matrix.
            large: the larger one.
            device: where it is.
            dtype: that the iteration computes in.
        """
        if not (self._may_multiply and bool(torch.backends.mkldnn.enabled)):
            return False
        shape, kind = (small, large), (small, large, dtype, device.type)
        known = self._onednn.get(kind)
        if known is None:
            known, stored = is_multiplied(small, dtype, device), self._stored.get(shape)
            if stored is None:
                known = known and self._share(small) < _MARGIN
            elif stored and not known:
                self._do_without_onednn(shape)
            else:
                known = stored
            self._onednn[kind] = known
        return known

    def method_of(self, small: int, large: int) -> str:
        """Return the method of a shape, chosen when it is first asked for.

        Args:
            small: the smaller dimension of the matrix.
            large: the larger one.
        """
        known = self._chosen.get((small, large))
        if known is None:
            known = choose_method(self._method, self._coefficients, small, large, self._rates)
            self._chosen[small, large] = known
        return known

    def wide_method_of(
        self,
        small: int,
        large: int,
        device: torch.device,
        dtype: torch.dtype,
        best: Spectrum,
        *,
        relaxed: bool,
        onednn: bool = False,
    ) -> str:
        """Return what :func:`~megaopt_muon.choice.schedule.plan_blocks` is to do with a shape, chosen once.

        Args:
            small: the smaller dimension of the matrix.
            large: the larger one.
            device: where it is.
            dtype: that the iteration computes in.
            best: the most that can be known of its singular values.
            relaxed: float32 stands in for bfloat16.
            onednn: oneDNN multiplies, as :meth:`onednn_of` says.
        """
        shape = small, large
        if shape not in self._tried:
            self._tried.add(shape)
            stored = self._chosen.get(shape)
            kind = {"relaxed": relaxed, "onednn": onednn}
            blocks = plan_blocks(self._asked(stored), self._coefficients, *shape, device, dtype, best, **kind)
            single = set(blocks) == {1}
            if stored == "gram" and single and self._method == "auto":
                self._give_up(shape)
            self._chosen[shape] = "plain" if single else "gram"
        if self._method != "auto":
            return self._method
        return "standard" if self._chosen[shape] == "plain" else "runs"

    def _asked(self, stored: str | None) -> str:
        """Return the method that a shape is to be iterated by, where one is stored or forced, else `"auto"`."""
        if self._method != "auto":
            return self._method
        return {"plain": "standard", "gram": "runs"}.get(stored or "", "auto")

    def half_runs_of(self, small: int, large: int, share: float) -> tuple[int, ...]:
        """Return the runs of a shape that is iterated in float16.

        Args:
            small: the smaller dimension of the matrix.
            large: the larger one.
            share: the part of a whole product's time that a symmetric one takes.
        """
        shape = small, large
        stored = self._chosen.get(shape)
        runs = half_runs(self._asked(stored), self._coefficients, small, large, share)
        single = set(runs) <= {1}
        if stored == "gram" and single and self._method == "auto":
            self._give_up(shape)
        self._chosen[shape] = "plain" if single else "gram"
        return runs

    @property
    def text(self) -> str:
        """All that is chosen, as one string."""
        asked = {(small, large) for small, large, *_ in self._onednn}
        by_onednn = {shape for shape, known in self._stored.items() if known and shape not in asked}
        by_onednn |= {(small, large) for (small, large, *_), known in self._onednn.items() if known}
        return written_plan(
            {shape: name + (ONEDNN if shape in by_onednn else "") for shape, name in self._chosen.items()}
        )


def is_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices are iterated in whole products: in 16 bits on a processor.

    Args:
        dtype: that the iteration computes in.
        device: where it runs.
    """
    return device.type == "cpu" and dtype.itemsize == 2
