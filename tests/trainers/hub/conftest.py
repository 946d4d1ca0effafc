"""Ranks are forked from a server that has imported the trainers, which takes many seconds."""

import warm

warm.OTHERS += ["accelerate", "lightning.pytorch", "transformers"]
warm.PACKAGES.append("trainers")
