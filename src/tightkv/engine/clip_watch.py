"""Tells when more values are clipped than calibration should let through."""

from __future__ import annotations

import logging

from tightkv.kvcache import KVCacheStorage

__all__ = ["ClipWatch"]

_logger = logging.getLogger("tightkv")

_WORTH_A_WARNING = 0.001
_STEPS_BETWEEN_LOOKS = 256


class ClipWatch:
    """Looks at the clip counts of a cache now and then, and warns once of each layer."""

    def __init__(self, storage: KVCacheStorage) -> None:
        self._storage = storage
        self._warned: set[int] = set()
        self._steps = 0

    def after_step(self, is_idle: bool) -> dict[int, tuple[float, float]] | None:
        """The rates by layer, when it is time to look; None otherwise."""
        self._steps += 1
        if not is_idle and self._steps % _STEPS_BETWEEN_LOOKS:
            return None
        rates = self._storage.clip_rates()
        for layer, (k, v) in rates.items():
            if max(k, v) > _WORTH_A_WARNING and layer not in self._warned:
                self._warned.add(layer)
                _logger.warning(
                    "Layer %d clips %.2f %% of K and %.2f %% of V: calibrate on text like that "
                    "which is served (`tightkv calibrate`), or give the layer a wider format.",
                    layer,
                    100 * k,
                    100 * v,
                )
        return rates
