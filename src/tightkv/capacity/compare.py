"""A plan next to a running server: what was predicted, and what it says of itself."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tightkv.errors import CheckpointError, ConfigError
from tightkv.models.compatibility import one_line
from tightkv.planning import CapacityPlan, FormatPlan

__all__ = ["Comparison", "ComparisonRow", "ServerFacts", "compare", "read_server"]

_TIMEOUT = 10.0
_LONGEST = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure; `key` names it in `texts.yaml`, `is_bytes` says how to show it."""

    key: str
    predicted: float
    actual: float
    is_bytes: bool = False

    @property
    def difference(self) -> float:
        """Predicted over actual, less 1."""
        return self.predicted / self.actual - 1 if self.actual else float("inf")


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures that the server tells."""

    url: str
    format_name: str
    rows: tuple[ComparisonRow, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What `/metrics` says; None where this server does not say it.

    Attributes:
        kv_cache_dtype: of the cache, as `K/V` where they differ.
        num_blocks: in the pool.
        num_tokens: that it holds in all layers.
        memory: bytes by part, as TightKV has them: weights, activations, kv_cache.
    """

    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    num_tokens: int
    bytes_per_token: float | None
    memory: Mapping[str, float]

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `plan` that make it plan for the same cache."""
        return {"kv_cache_dtypes": (self.kv_cache_dtype,), "block_size": self.block_size}


def read_server(url: str) -> ServerFacts:
    """Read `URL/metrics` of vLLM or TightKV.

    Raises:
        ConfigError: for an address that is none.
        CheckpointError: if nothing can be read there, or not the cache's settings.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address of a server: give it as http://127.0.0.1:8000.")
    address = f"{url.rstrip('/').removesuffix('/metrics').removesuffix('/v1')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer:
            text = answer.read(_LONGEST).decode("utf-8")
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{address} cannot be read ({one_line(error)}): check the address, and that the "
            "server runs."
        ) from error
    settings = next((s.labels for s in samples if s.name == "vllm:cache_config_info"), None)
    if settings is None or not settings.get("num_gpu_blocks", "").isdigit():
        raise CheckpointError(
            f"{address} has no vllm:cache_config_info with num_gpu_blocks: compare with a server "
            "of vLLM or TightKV."
        )
    num_blocks, block_size = int(settings["num_gpu_blocks"]), int(settings.get("block_size", "16"))
    per_token = [s.value for s in samples if s.name == "tightkv:kv_cache_bytes_per_token"]
    return ServerFacts(
        kv_cache_dtype=_format_name(settings),
        block_size=block_size,
        num_blocks=num_blocks,
        num_tokens=int(settings.get("kv_cache_size_tokens", num_blocks * block_size)),
        bytes_per_token=per_token[0] if per_token else None,
        memory={s.labels["part"]: s.value for s in samples if s.name == "tightkv:memory_bytes"},
    )


def _format_name(settings: Mapping[str, str]) -> str:
    """As `plan` takes it: one name, or those of K and V."""
    one = settings.get("cache_dtype", "auto")
    k, v = settings.get("k_cache_dtype", one), settings.get("v_cache_dtype", one)
    return k if k == v else f"{k}/{v}"


def compare(plan: CapacityPlan, server: ServerFacts, url: str) -> Comparison:
    """The plan's figures beside the server's, for the format that comes nearest to the server's."""
    chosen = _chosen(plan, server)
    rows = []
    if server.bytes_per_token is not None:
        rows.append(
            ComparisonRow("what_bytes_per_token", chosen.bytes_per_token, server.bytes_per_token)
        )
    pool = server.memory.get("kv_cache")
    if pool is not None:
        blocks = int(pool) // chosen.bytes_per_block
        rows.append(ComparisonRow("what_blocks", blocks, server.num_blocks))
        rows.append(ComparisonRow("what_pool", plan.pool.best, pool, is_bytes=True))
    for part in ("weights", "activations"):
        if part in server.memory:
            best = next(term.size.best for term in plan.waterfall if term.key == part)
            rows.append(ComparisonRow(f"what_{part}", best, server.memory[part], is_bytes=True))
    rows.append(ComparisonRow("what_tokens", chosen.num_tokens.best, server.num_tokens))
    return Comparison(url, chosen.name, tuple(rows))


def _chosen(plan: CapacityPlan, server: ServerFacts) -> FormatPlan:
    named = [formats for formats in plan.formats if formats.name == server.kv_cache_dtype]
    if named or server.bytes_per_token is None:
        return (named or list(plan.formats))[0]
    actual = server.bytes_per_token
    return min(plan.formats, key=lambda formats: abs(formats.bytes_per_token - actual))
