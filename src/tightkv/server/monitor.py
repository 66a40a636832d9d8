"""What is known of the running server: metrics, the page's state, a line in the log per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version

from tightkv.config import CacheConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.request import Request
from tightkv.metrics import EngineSnapshot, RequestStats
from tightkv.metrics.prometheus import ServerMetrics
from tightkv.metrics.repetition import has_repetition_loop
from tightkv.server import state
from tightkv.server.async_engine import AsyncEngine
from tightkv.server.history import History
from tightkv.server.quality_watch import QualityWatch

__all__ = ["Monitor"]

_logger = logging.getLogger("tightkv.requests")


class Monitor:
    """Told by the engine's thread what happens; asked by the routes."""

    def __init__(
        self,
        engine: LLMEngine,
        model_name: str,
        latest_snapshot: Callable[[], EngineSnapshot],
        logs_prompts: bool = False,
    ) -> None:
        """Begin to count.

        Args:
            engine: that is served; only facts that never change are read from it.
            model_name: the name in answers.
            latest_snapshot: the engine's state, without waiting.
            logs_prompts: whether the text of prompts goes into the log.
        """
        self.metrics = ServerMetrics(model_name, _cache_labels(engine), latest_snapshot)
        self.quality: QualityWatch | None = None
        self._history = History(latest_snapshot=latest_snapshot)
        self._latest_snapshot = latest_snapshot
        self._logs_prompts = logs_prompts
        self._num_finished = 0
        self._facts = state.ServerFacts(
            model=model_name,
            version=version("tightkv"),
            chat=engine.model.tokenizer.chat_template is not None,
            start_time=time.monotonic(),
        )

    def state(self, engine: AsyncEngine) -> state.State:
        """What the page shows."""
        return state.build(
            self._facts,
            engine.latest_snapshot(),
            self._history,
            now=time.monotonic(),
            arrival_times=engine.arrival_times(),
            error=engine.error,
            quality=self.quality.summary() if self.quality else None,
        )

    def totals(self) -> str:
        """What has been served so far, in a line."""
        snapshot = self._latest_snapshot()
        stats, slot_bytes = snapshot.stats, snapshot.swap.slot_bytes
        return (
            f"{self._num_finished:,} requests, {stats.prompt_tokens:,} prompt tokens and "
            f"{stats.generation_tokens:,} generated; {stats.num_preemptions:,} preemptions, by "
            f"which {stats.num_preempted_tokens:,} tokens were lost; swapped out "
            f"{stats.num_swapped_out_blocks * slot_bytes:,} bytes, "
            f"in {stats.num_swapped_in_blocks * slot_bytes:,}"
        )

    def on_tokens(self, stats: RequestStats, count: int, now: float) -> None:
        self.metrics.on_tokens(stats, count, now)
        self._history.on_tokens(stats, count, now)

    def on_step(self, num_tokens: int) -> None:
        self.metrics.on_step(num_tokens)
        self._history.on_step(num_tokens)

    def on_finished(self, request: Request, stats: RequestStats) -> None:
        self.metrics.on_finished(stats)
        self._num_finished += 1
        for sequence in request.sequences:
            if has_repetition_loop(sequence.token_ids[sequence.prompt_len :]):
                self.metrics.on_repetition_loop()
        if self._logs_prompts:
            _logger.info("%s prompt: %r", request.request_id, request.prompt)
        _logger.info("%s %s", request.request_id, _in_words(stats))


def _in_words(stats: RequestStats) -> str:
    end = stats.finished_time or stats.arrival_time
    first = stats.first_token_time
    return (
        f"{stats.finished_reason}: {stats.num_prompt_tokens} prompt tokens "
        f"({stats.num_cached_tokens} cached), {stats.num_generation_tokens} generated, "
        + (f"first after {first - stats.arrival_time:.3f} s, " if first else "")
        + f"{end - stats.arrival_time:.3f} s in all, {stats.num_preemptions} preemptions"
    )


def _cache_labels(engine: LLMEngine) -> dict[str, str]:
    """VLLM's names where it has them: labels of `vllm:cache_config_info`."""
    cache, plan = engine.config.cache, engine.plan
    labels = {
        option.name: str(getattr(cache, option.name))
        for option in fields(CacheConfig)
        if not option.metadata.get("python_only")
    }
    return labels | {
        "cache_dtype": cache.kv_cache_dtype,
        "num_gpu_blocks": str(plan.num_blocks),
        "kv_cache_size_tokens": str(plan.num_tokens),
        "kv_cache_max_concurrency": f"{plan.max_concurrency(plan.max_model_len):.2f}",
    }
