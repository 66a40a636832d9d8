"""Where blocks live: specs, storage, the block pool, prefix caching and block tables."""

from tightkv.kvcache.kv_cache_manager import KVCacheManager
from tightkv.kvcache.metadata import AttentionMetadata
from tightkv.kvcache.spec import KVCacheSpec, LayerGroup, group_layers
from tightkv.kvcache.storage import KVCacheStorage
from tightkv.kvcache.swapping_manager import SwappingKVCacheManager

__all__ = [
    "AttentionMetadata",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheStorage",
    "LayerGroup",
    "SwappingKVCacheManager",
    "group_layers",
]
