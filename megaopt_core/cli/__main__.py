"""`python -m megaopt_core.cli` is `megaopt`."""

import sys

from megaopt_core.cli._program import main

if __name__ == "__main__":
    sys.exit(main())
