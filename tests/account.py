"""Count what a run of tox has tested: by environment, what was skipped and why, what ran nowhere, what took long.

    python tests/account.py            # reads what the last `tox` has left in .tox
    python tests/account.py --slowest 50

Every environment's pytest writes `.tox/NAME/log/tests.xml`. A test that is skipped in each environment that has it is
listed: it tests nothing.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """What came of one test in one environment.

    Args:
        environment: its name.
        test: file and name.
        seconds: how long it took.
        why_not: the reason for which it was skipped; None where it ran.
        failed: whether it failed, or could not be set up.
    """

    environment: str
    test: str
    seconds: float
    why_not: str | None
    failed: bool


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Read what the environments of a folder have written."""
    for path in sorted(folder.glob("*/log/tests.xml")):
        for case in ET.parse(path).iter("testcase"):  # noqa: S314 - pytest wrote it
            skipped = case.find("skipped")
            yield Outcome(
                environment=path.parents[1].name,
                test=f"{case.get('classname')}::{case.get('name')}",
                seconds=float(case.get("time", 0)),
                why_not=None if skipped is None else _reason(skipped),
                failed=case.find("failure") is not None or case.find("error") is not None,
            )


def _reason(skipped: ET.Element) -> str:
    """What pytest says, on one line, without Python's words for a module that is missing."""
    said = " ".join((skipped.get("message") or "").split())
    return said.removeprefix("Skipped: ").partition(": No module named")[0]


def report(found: Iterable[Outcome], slowest: int) -> Iterator[str]:
    """Yield the lines of the account: tables in Markdown.

    Args:
        found: of all environments.
        slowest: how many tests to list by what they took, over all environments.
    """
    listed = list(found)
    yield from _environments(listed)
    yield from _reasons(listed)
    yield from _nowhere(listed)
    yield from _slow(listed, slowest)


def _environments(found: list[Outcome]) -> Iterator[str]:
    yield "| environment | tests | ran | skipped | failed | seconds of tests |"
    yield "|---|---|---|---|---|---|"
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in found:
        groups[outcome.environment].append(outcome)
    for name, own in {**groups, "together": found}.items():
        skipped, failed = sum(one.why_not is not None for one in own), sum(one.failed for one in own)
        seconds = sum(one.seconds for one in own)
        yield f"| {name} | {len(own)} | {len(own) - skipped} | {skipped} | {failed} | {seconds:.0f} |"


def _reasons(found: list[Outcome]) -> Iterator[str]:
    yield from ("", "| skipped because | times | in |", "|---|---|---|")
    times: Counter[str] = Counter(one.why_not for one in found if one.why_not is not None)
    for reason, count in times.most_common():
        where = sorted({one.environment for one in found if one.why_not == reason})
        yield f"| {reason} | {count} | {', '.join(where)} |"


def _nowhere(found: list[Outcome]) -> Iterator[str]:
    ran = {one.test for one in found if one.why_not is None}
    # pytest counts a file that is skipped as a whole as one test without a class, named after the file.
    ran |= {f"::{test.partition('::')[0]}" for test in ran}
    never = {one.test: one.why_not for one in found if one.test not in ran}
    yield from ("", f"{len(never)} of {len({one.test for one in found})} tests ran in no environment:", "")
    yield from (f"- {test}: {reason}" for test, reason in sorted(never.items()))


def _slow(found: list[Outcome], count: int) -> Iterator[str]:
    yield from ("", "| slowest | environments | seconds in all |", "|---|---|---|")
    seconds: Counter[str] = Counter()
    for one in found:
        seconds[one.test] += one.seconds
    where = Counter(one.test for one in found if one.why_not is None)
    yield from (f"| {test} | {where[test]} | {total:.1f} |" for test, total in seconds.most_common(count))


def main() -> int:
    """Print the account; end with 1 where there is nothing to count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".tox", help="the folder of environments")
    parser.add_argument("--slowest", type=int, default=25, help="how many slow tests to list")
    given = parser.parse_args()
    found = list(outcomes(given.folder))
    if not found:
        print(f"no environment in {given.folder} has left a log/tests.xml: run tox first", file=sys.stderr)
        return 1
    print("\n".join(report(found, given.slowest)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
