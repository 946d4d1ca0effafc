"""Compare the fixtures with the real models of transformers, timm and peft.

    python tests/models/regenerate.py            # fails when a model differs from its fixture or its expected roles
    python tests/models/regenerate.py --write    # writes the fixtures anew; the expected roles stay hand-written

Models are built from configurations on the meta device: nothing is downloaded.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from model_fixtures.checking import describe, disagreements, fixture_path, read_fixture
from model_fixtures.others import PLAIN_TORCH
from model_fixtures.real import REAL


def main() -> int:
    """Check every model, or write its fixture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the fixtures instead of comparing them")
    parser.add_argument("names", nargs="*", help="models; all by default")
    options = parser.parse_args()
    failed = 0
    for name, build in {**REAL, **PLAIN_TORCH}.items():
        if options.names and name not in options.names:
            continue
        with torch.device("meta"):
            model = build()
        rows = describe(model)
        if options.write:
            lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
            fixture_path(name).write_text(f"[\n{lines}\n]\n")
        problems = disagreements(name, model)
        if rows != read_fixture(name):
            changed = [row for row in rows if row not in read_fixture(name)]
            problems.append(f"the fixture differs; new or changed: {changed}")
        print(f"{name:20} {len(rows):4} parameters  {'ok' if not problems else 'DIFFERS'}")  # noqa: T201 - a script prints
        for problem in problems:
            print(f"    {problem}")  # noqa: T201 - as above
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
