"""Main parameters, main gradients and optimizer states that are kept in fewer bits than fp32."""

from megaopt_lowbit.policy import ParamRemainders

__all__ = ["ParamRemainders"]
