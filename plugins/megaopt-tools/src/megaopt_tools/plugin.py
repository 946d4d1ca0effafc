"""Entry point of megaopt-tools: the commands that it adds to megaopt."""

__all__ = ["megaopt_api"]

megaopt_api = "1"
