"""What the compute capability of an NVIDIA GPU tells."""

from __future__ import annotations

__all__ = ["COMPILED_CAPABILITY", "converts_fp8"]

COMPILED_CAPABILITY = (8, 0)
"""The lowest for which the Triton kernels are compiled and checked ahead of time."""


def converts_fp8(capability: tuple[int, int]) -> bool:
    """Whether the device multiplies and converts FP8 itself: from Ada (8.9) on."""
    return capability >= (8, 9)
