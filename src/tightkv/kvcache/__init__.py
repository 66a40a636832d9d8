"""Where blocks live: specs, storage, the block pool, prefix caching and block tables."""

from tightkv.kvcache.kv_cache_manager import KVCacheManager
from tightkv.kvcache.metadata import AttentionMetadata
from tightkv.kvcache.spec import (
    KVCacheSpec,
    LayerGroup,
    are_alike,
    group_layers,
    layers_by_window,
)
from tightkv.kvcache.storage import KVCacheStorage
from tightkv.kvcache.swapping_manager import SwappingKVCacheManager
from tightkv.kvcache.window import most_blocks

__all__ = [
    "AttentionMetadata",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheStorage",
    "LayerGroup",
    "SwappingKVCacheManager",
    "are_alike",
    "group_layers",
    "layers_by_window",
    "most_blocks",
]
