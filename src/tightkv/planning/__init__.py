"""How much memory there is, and how many blocks it gives."""

from tightkv.planning.memory import (
    MemoryPlan,
    PoolRequest,
    available_memory,
    check_max_model_len,
    plan_memory,
)

__all__ = [
    "MemoryPlan",
    "PoolRequest",
    "available_memory",
    "check_max_model_len",
    "plan_memory",
]
