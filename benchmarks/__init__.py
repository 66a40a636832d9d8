"""Benchmarks, run from the repository's root: `python -m benchmarks.cpu`."""
