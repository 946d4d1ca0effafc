"""Load manifests of strangers and files with flipped bits: a named error and nothing changed, or right values.

    python tests/faults/fuzz_checkpoints.py --manifests 2000 --flips 2000

A manifest is changed in one to three random places and signed again; a flip changes one bit of one file. Each is
verified and loaded. A load that is refused must raise one of our errors and leave model, states, settings, scheduler
and scaler as they were; what verification finds in the files it must refuse too. Where a flip is not
found, the values must be the saved ones. No file outside the checkpoint may be opened.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/megaopt-checkpoint/tests"))

from hostile import build, change, opened_files, read, save_good, sign, snapshot, unchanged
from megaopt_checkpoint import load_checkpoint, verify_checkpoint
from training import stand_in

from megaopt_core.errors import CheckpointCorruptError, MegaoptError


class Trial:
    """One folder that is spoiled, looked at and restored, again and again."""

    def __init__(self, folder: str | Path) -> None:
        self.good, self.bad = Path(folder) / "good", Path(folder) / "bad"
        save_good(self.good)
        shutil.copytree(self.good, self.bad)
        self.saved = snapshot(*build())
        self.live = build(seed=1)
        self.before = snapshot(*self.live)

    def restore(self) -> None:
        """Make the bad folder good again, and the live objects what they were."""
        for file in self.good.iterdir():
            shutil.copyfile(file, self.bad / file.name)
        self.live = build(seed=1)
        self.before = snapshot(*self.live)

    def outcome(self, is_flip: bool) -> str:
        """Verify and load; return what happened, or raise SystemExit when it may not happen."""
        found = None
        try:
            verify_checkpoint(self.bad)
        except MegaoptError as error:
            found = error
        with opened_files() as opened:
            try:
                load_checkpoint(self.bad, *self.live)
            except MegaoptError as error:
                self._refused(error, found)
                return type(error).__name__
        outside = [path for path in opened if path.startswith(("/", "..")) and str(self.bad) not in path]
        if outside:
            raise SystemExit(f"opened outside of the checkpoint: {outside}")
        if found is not None:
            raise SystemExit(f"verification refuses what a load takes: {found}")
        if is_flip and not unchanged(self.saved, snapshot(*self.live)):
            raise SystemExit("a flipped bit was loaded")
        return "loaded"

    def _refused(self, error: MegaoptError, found: MegaoptError | None) -> None:
        if not unchanged(self.before, snapshot(*self.live)):
            raise SystemExit(f"half changed: {error}")
        if isinstance(error, CheckpointCorruptError) and found is None:
            raise SystemExit(f"verification does not find what a load refuses: {error}")


def manifests(trial: Any, count: int, chance: random.Random) -> Counter[str]:
    """Return how often what happened."""
    counts, what = Counter(), []
    for index in range(count):
        document = read(trial.good)
        what = [change(document, chance) for _ in range(chance.choice([1, 1, 2, 3])) if document]
        sign(trial.bad, document)
        counts[_watched(trial, f"manifest {index}: {what}", is_flip=False)] += 1
        if trial.spoiled:
            trial.restore()
    return counts


def flips(trial: Any, count: int, chance: random.Random) -> Counter[str]:
    """Return how often what happened."""
    counts = Counter()
    trial.restore()
    for index in range(count):
        file = chance.choice(sorted(trial.bad.iterdir()))
        data = bytearray(file.read_bytes())
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        data[at] ^= 1 << bit
        file.write_bytes(data)
        counts[_watched(trial, f"flip {index}: bit {bit} of byte {at} of {file.name}", is_flip=True)] += 1
        data[at] ^= 1 << bit
        file.write_bytes(data)
        if trial.spoiled:
            trial.restore()
    return counts


def _watched(trial: Any, what: str, *, is_flip: bool) -> str:
    try:
        happened = trial.outcome(is_flip)
    except SystemExit as fault:
        raise SystemExit(f"{what}: {fault}") from None
    except BaseException:  # noqa: BLE001 - whatever it is, it is a fault
        traceback.print_exc()
        raise SystemExit(f"{what}: no error of ours") from None
    trial.spoiled = happened == "loaded"
    return happened


def main(arguments: Sequence[str] | None = None) -> None:
    """Try as often as asked, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifests", type=int, default=2000)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", file=sys.stderr)
    torch.set_num_threads(1)
    chance = random.Random(options.seed)  # noqa: S311 - the same again
    with stand_in(), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        # A manifest may say that a parameter was in another group; what follows is said aloud, and is no fault.
        warnings.filterwarnings("ignore", message="parameters that were in several groups")
        trial = Trial(folder)
        result = {
            "seed": options.seed,
            "manifests": manifests(trial, options.manifests, chance),
            "flips": flips(trial, options.flips, chance),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
