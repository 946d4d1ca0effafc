"""Keeps pytest away from adapters whose classes have bases of a trainer; `tests/trainers/` imports them."""

collect_ignore = [f"src/megaopt_trainers/{name}.py" for name in ("lightning", "torchtitan", "transformers")]
