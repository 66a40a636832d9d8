"""Capacity planning: a model's config and a device's memory in, requests that fit out."""

from tightkv.capacity.compare import Comparison, ComparisonRow, ServerFacts, compare, read_server
from tightkv.capacity.plan import DEFAULT_KV_CACHE_DTYPES, plan

__all__ = [
    "DEFAULT_KV_CACHE_DTYPES",
    "Comparison",
    "ComparisonRow",
    "ServerFacts",
    "compare",
    "plan",
    "read_server",
]
