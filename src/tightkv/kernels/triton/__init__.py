"""Kernels for GPUs, in Triton; docs/gpu.md. Importing the package takes Triton."""

from tightkv.kernels.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
