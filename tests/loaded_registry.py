"""Imported last by the server of warm processes: it loads plugins once, for all that are forked from it."""

from megaopt_core import get_registry

get_registry().optimizers()
