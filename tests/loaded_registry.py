"""Imported last by the server of warm processes: what all that are forked from it would do, done once."""

import gc

from megaopt_core import get_registry

get_registry().optimizers()
# What is here stays: no collection in a forked process walks over it, which would copy its memory.
gc.collect()
gc.freeze()
