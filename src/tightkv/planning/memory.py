"""Pool size: bytes from the user or from what the machine has left, blocks from the specs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tightkv.config import CacheConfig
from tightkv.errors import ConfigError, InsufficientMemoryError
from tightkv.kvcache import LayerGroup
from tightkv.planning.footprint import Footprint, tokens_in

__all__ = [
    "MemoryPlan",
    "PoolRequest",
    "available_memory",
    "check_max_model_len",
    "installed_memory",
    "plan_memory",
]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What the pool must serve, and what else needs memory.

    Attributes:
        max_model_len: longest sequence asked for; None: as the model and the pool allow.
        max_position: longest sequence that the model knows.
        max_chunk: tokens of a sequence that one step computes at most.
        total_bytes: memory available before the weights were loaded; None: the system does not
            tell.
        weight_bytes: bytes of the weights.
        peak_bytes: bytes of a step's largest intermediate results.
        reserve_bytes: of a device, what captured steps, libraries and other processes take.
    """

    max_model_len: int | None
    max_position: int
    max_num_seqs: int
    max_chunk: int
    total_bytes: int | None
    weight_bytes: int
    peak_bytes: int
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The pool.

    Attributes:
        num_blocks: block ids, which all layer groups share.
        bytes_per_block: bytes of one block id.
        footprint: what sequences hold.
        max_model_len: longest sequence that is served.
        reason: where the size comes from, for the log.
    """

    num_blocks: int
    bytes_per_block: int
    footprint: Footprint
    max_model_len: int
    reason: str

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.footprint.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds in all layers, as if none had left a window."""
        return tokens_in(self.num_blocks, len(self.footprint.groups), self.block_size)

    @property
    def bytes_per_token(self) -> float:
        return self.footprint.bytes_per_token

    def max_concurrency(self, num_tokens: int) -> float:
        """Sequences of `num_tokens` tokens that fit at once."""
        return self.footprint.sequences(self.pool_bytes, num_tokens)


def plan_memory(
    groups: tuple[LayerGroup, ...], cache: CacheConfig, request: PoolRequest
) -> MemoryPlan:
    """Size the pool.

    Raises:
        ConfigError: if `max_model_len` is more than the model knows.
        InsufficientMemoryError: if one sequence of the wanted length does not fit.
    """
    wanted = request.max_model_len or request.max_position
    check_max_model_len(request.max_model_len, request.max_position)
    bytes_per_block = groups[0].page_bytes
    footprint = Footprint.of(groups, cache.block_size, request.max_chunk)
    budget, reason = _budget(cache, request)
    num_blocks = budget // bytes_per_block
    most = request.max_num_seqs * footprint.most(wanted) // bytes_per_block
    if num_blocks > most:
        num_blocks = most
        reason += f"; cut to {request.max_num_seqs} sequences of {wanted} tokens"
    pool_bytes = num_blocks * bytes_per_block
    shortest = request.max_model_len or cache.block_size
    needed = footprint.most(shortest)
    if pool_bytes < needed:
        raise InsufficientMemoryError(
            f"The KV cache pool has {_size(budget)} ({reason}), but one sequence of {shortest} "
            f"tokens needs {_size(needed)}: raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization, lower --max-model-len, or choose a narrower "
            "--kv-cache-dtype."
        )
    if request.total_bytes is not None and pool_bytes + request.weight_bytes > request.total_bytes:
        raise InsufficientMemoryError(
            f"The KV cache pool of {_size(pool_bytes)} and the weights of "
            f"{_size(request.weight_bytes)} are more than the {_size(request.total_bytes)} "
            "available: lower --kv-cache-memory-bytes."
        )
    max_model_len = footprint.longest(pool_bytes, wanted)
    if max_model_len < wanted:
        reason += (
            f"; sequences of {wanted:,} tokens do not fit, so max_model_len is {max_model_len:,}"
        )
    return MemoryPlan(
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        footprint=footprint,
        max_model_len=max_model_len,
        reason=reason,
    )


def check_max_model_len(max_model_len: int | None, max_position: int) -> None:
    """Raise ConfigError if sequences longer than the model knows are asked for."""
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model knows {max_position} positions: "
            "lower it."
        )


def available_memory() -> int | None:
    """Bytes that this process may still take: the machine's free memory, or its cgroup's rest.

    None where the system does not tell.
    """
    available = _of_meminfo("MemAvailable")
    if available is None:
        return None
    return min([available, *(max(0, limit - usage) for limit, usage in _cgroup_limits())])


def installed_memory() -> int | None:
    """Bytes that this machine, or this process's cgroup, has in all; None: not told."""
    installed = _of_meminfo("MemTotal")
    return None if installed is None else min([installed, *(pair[0] for pair in _cgroup_limits())])


def _budget(cache: CacheConfig, request: PoolRequest) -> tuple[int, str]:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if request.total_bytes is None:
        raise ConfigError(
            "This system does not tell its free memory (/proc/meminfo): set "
            "--kv-cache-memory-bytes."
        )
    usable = int(request.total_bytes * cache.gpu_memory_utilization)
    budget = usable - request.weight_bytes - request.peak_bytes - request.reserve_bytes
    reason = (
        f"{cache.gpu_memory_utilization:g} of {_size(request.total_bytes)} available, less "
        f"{_size(request.weight_bytes)} weights and {_size(request.peak_bytes)} for a step"
    )
    if request.reserve_bytes:
        reason += f" and {_size(request.reserve_bytes)} for graphs, libraries and other processes"
    return max(budget, 0), reason


def _size(num_bytes: int) -> str:
    return (
        f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"
    )


def _of_meminfo(name: str) -> int | None:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith(f"{name}:")]
    return kibibytes[0] * 1024 if kibibytes else None


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and usage of this process's cgroups (version 2 or 1), from its own up to the root."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder == root or root in folder.parents:
            limits += _limit(folder, *names)
            folder = folder.parent
    return limits


def _limit(folder: Path, limit_name: str, usage_name: str) -> list[tuple[int, int]]:
    limit_file, usage_file = folder / limit_name, folder / usage_name
    if not limit_file.is_file() or not usage_file.is_file():
        return []
    limit = limit_file.read_text().strip()
    if limit == "max":
        return []
    return [(int(limit), int(usage_file.read_text()))]
