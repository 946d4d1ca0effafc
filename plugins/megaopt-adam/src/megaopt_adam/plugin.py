"""Entry point of megaopt-adam: what it offers to megaopt."""

__all__ = ["megaopt_api"]

megaopt_api = "1"
