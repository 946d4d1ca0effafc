"""The distribution in this folder is not part of megaopt: test_guide.py installs it, and runs its tests there."""

collect_ignore = ["megaopt-signum"]
