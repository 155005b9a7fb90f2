"""Numerical kernels of primitives: functions of arrays, without graphs."""

__all__ = ["reference"]
