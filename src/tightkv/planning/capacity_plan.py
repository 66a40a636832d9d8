"""What a plan says: plain values, the same for the table, for Markdown and for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tightkv.planning.hardware import Hardware

__all__ = [
    "CapacityPlan",
    "Decode",
    "FormatPlan",
    "LayerKind",
    "Message",
    "ModelSummary",
    "Needed",
    "PlanSettings",
    "Range",
    "Term",
]

SCHEMA_VERSION = 1
"""Of the JSON; raised when a field changes its name or its meaning."""


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate: at least, most likely, at most. The three are equal where nothing is guessed."""

    low: int
    best: int
    high: int

    @classmethod
    def exactly(cls, value: int) -> Range:
        return cls(value, value, value)

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence: a key of `texts.yaml`, and what to put in."""

    key: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the waterfall, in bytes of one device; `key` names it in `texts.yaml`."""

    key: str
    size: Range
    basis: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What was asked for, with nothing left open.

    Attributes:
        engine: whose behaviour is planned, "vllm" or "tightkv".
        replicas: groups of `tensor_parallel_size` devices; all other figures are of one.
        max_model_len: longest request, prompt and answer together.
        is_length_given: whether that was asked for; else it is what the model knows.
        typical_len: an ordinary request, in tokens.
        concurrency: requests that must fit at once, if some must.
    """

    engine: str
    tensor_parallel_size: int
    replicas: int
    max_model_len: int
    is_length_given: bool
    typical_len: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    concurrency: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model, as far as the plan depends on it; see `ModelFacts`."""

    name: str
    model_type: str
    num_parameters: int
    num_layers: int
    num_shared_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    max_position: int
    dtype: str
    dtype_bytes: int
    weight_bytes: int
    weight_source: str


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one kind.

    Attributes:
        kind: "full", "window" or "latent".
        window: in tokens, of "window".
        bytes_per_token: of all these layers together, on one device.
    """

    kind: str
    window: int | None
    num_layers: int
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Upper bound of the decode speed.

    Attributes:
        num_requests: in the batch, each `typical_len` tokens long.
        tokens_per_second: of all of them together.
        bound: "memory" or "compute".
        kv_share: share of the bytes of a step that are K and V.
    """

    num_requests: int
    tokens_per_second: float
    bound: str
    kv_share: float


@dataclass(frozen=True, slots=True)
class Needed:
    """For `concurrency` requests of `num_tokens` tokens: bytes of pool, and of each device."""

    num_tokens: int
    pool_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPlan:
    """One choice of KV formats. Bytes are those of one device.

    Attributes:
        name: as it was asked for.
        formats: what K and V of the layers are stored as, in words.
        has_integers: whether some of them are stored as whole numbers.
        effective_bits: bits per value, scales and padding included.
        bytes_per_token: in all layers, padding of pages included.
        bytes_per_block: of one block id in TightKV's pool; elsewhere of a block in all layers.
        padding: share of bytes_per_token that no layer uses.
        layers: by kind.
        num_blocks: in the pool.
        pool_bytes: what the blocks take of the pool's room.
        num_tokens: that the pool holds in all layers, as if none had left a window; low, best and
            high.
        request_bytes: of one request of `max_model_len` tokens, at most.
        requests_at_max_len: that fit at once.
        requests_at_typical_len: the same, of `typical_len` tokens.
        longest_context: tokens of the longest single request, as the pool and the model allow.
        fits: whether all that was asked for fits.
    """

    name: str
    formats: tuple[str, ...]
    has_integers: bool
    effective_bits: float
    bytes_per_token: float
    bytes_per_block: int
    padding: float
    layers: tuple[LayerKind, ...]
    num_blocks: int
    pool_bytes: int
    num_tokens: Range
    request_bytes: int
    requests_at_max_len: float
    requests_at_typical_len: float
    longest_context: int
    decode: Decode | None
    needed: tuple[Needed, ...]
    fits: bool

    def is_cut(self, settings: PlanSettings) -> bool:
        """Whether TightKV makes no more blocks than the longest `max_num_seqs` requests need."""
        most = settings.max_num_seqs * self.request_bytes
        return settings.engine == "tightkv" and self.pool_bytes == most


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Which KV precision fits how many requests, on one group of devices.

    Attributes:
        waterfall: from the device's memory to the KV cache pool.
        formats: one for each that was asked for, in that order.
        recommendation: what to do, and why.
        notes: what a reader should know about this model and these settings.
        not_modelled: what the figures leave out.
    """

    model: ModelSummary
    hardware: Hardware
    settings: PlanSettings
    waterfall: tuple[Term, ...]
    formats: tuple[FormatPlan, ...]
    recommendation: tuple[Message, ...]
    notes: tuple[Message, ...]
    not_modelled: tuple[Message, ...]

    @property
    def fits(self) -> bool:
        """Whether at least one of the formats fits."""
        return any(plan.fits for plan in self.formats)

    @property
    def pool(self) -> Range:
        """Room for the KV cache, in bytes of one device."""
        return next(term.size for term in self.waterfall if term.key == "pool")

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, without texts; `schema_version` says which fields there are."""
        return {"schema_version": SCHEMA_VERSION, "fits": self.fits, **asdict(self)}
