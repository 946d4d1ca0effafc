"""How many checks were made, of how many there are, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from megaopt_testing.check import CheckResult, CheckStatus

__all__ = ["Tally"]


@frozen
class Tally:
    """The results of a run of the kit, counted.

    Args:
        checks: how many there are.
        ran: how many were made.
        skipped: how many cannot be made of what was checked.
        failed: how many do not hold.
        xfailed: how many do not hold, as the author said.

    Example:
        >>> tally = Tally.of([CheckResult("a", "", CheckStatus.PASSED), CheckResult("b", "", CheckStatus.SKIPPED)])
        >>> str(tally)
        'ran 1 of 2 checks, 0 failed, 1 skipped'
    """

    checks: int
    ran: int
    skipped: int
    failed: int
    xfailed: int

    @classmethod
    def of(cls, results: Iterable[CheckResult]) -> Tally:
        """Count.

        Args:
            results: one a check.
        """
        found = [result.status for result in results]
        skipped = found.count(CheckStatus.SKIPPED)
        return cls(
            len(found),
            len(found) - skipped,
            skipped,
            found.count(CheckStatus.FAILED),
            found.count(CheckStatus.XFAILED),
        )

    def __str__(self) -> str:
        more = [(self.skipped, "skipped"), (self.xfailed, "failed as expected")]
        told = "".join(f", {count} {word}" for count, word in more if count)
        return f"ran {self.ran} of {self.checks} checks, {self.failed} failed{told}"
