"""Keeps pytest away from adapters whose classes have bases of a trainer; `tests/trainers/` imports them."""

collect_ignore = ["src/megaopt_trainers/lightning.py", "src/megaopt_trainers/transformers.py"]
