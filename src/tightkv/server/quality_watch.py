"""Scores finished requests once more, in idle time: the served KV formats against full precision.

Prompt and answer are forced through two small engines that share the model's weights, one with
the served formats and scales, the other with an unquantized cache. Both take the path that
serves, token by token, so that what is exported is the served cache's own error.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass, replace

import torch

from tightkv.config import CacheConfig, EngineConfig, SchedulerConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.pool import sequence_bytes
from tightkv.engine.request import Request
from tightkv.engine.resolve import quiet_log
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import ConfigError, EngineError
from tightkv.metrics import kl_divergence
from tightkv.metrics.prometheus import ServerMetrics
from tightkv.models import LoadedModel
from tightkv.server.state import QualitySummary

__all__ = ["QualityWatch", "bytes_needed"]

_logger = logging.getLogger("tightkv")

_MAX_WAITING = 64
_CHUNK = 32
"""Prompt tokens of one step. A new request waits for one step at most: with SmolLM2-135M on two
cores, 16 tokens took 40 ms, 128 took 180 ms, and a token of the answer 18 ms."""
_LONGEST = 8192
"""Longest request that is scored where no max_model_len was given: some models know 131,072
positions, and the watch would hold a cache for all of them."""


def bytes_needed(config: EngineConfig, model: LoadedModel) -> int:
    """Bytes of the watch's two caches, which the pool's plan must leave free.

    Args:
        config: as the serving engine gets it.
        model: of the serving engine.

    Raises:
        ConfigError, ScaleError: as the engine would.
    """
    return sum(_pool_bytes(arm, model) for arm in _arm_configs(config))


class QualityWatch:
    """Work for an idle engine. The thread that steps the engine calls everything but `summary`."""

    def __init__(
        self,
        config: EngineConfig,
        engine: LLMEngine,
        metrics: ServerMetrics,
        *,
        sample_rate: float,
        seed: int = 0,
    ) -> None:
        """Make the two engines.

        Args:
            config: what `engine` was made with, not its resolved one: only so is the same policy
                decided again.
            engine: which serves.
            metrics: gets every scored token, and what became of every sampled request.
            sample_rate: share of the finished requests to be scored, above 0 and at most 1.
            seed: of the choice among them.

        Raises:
            ConfigError: for another rate.
            InsufficientMemoryError: if `bytes_needed` was not left free.
            EngineError: if the served formats or scales could not be had again.
        """
        if not 0 < sample_rate <= 1:
            raise ConfigError(
                f"kv_quality_sample_rate is {sample_rate:g}: it must be above 0 and at most 1; "
                "0 leaves the quality watch off."
            )
        with quiet_log():
            self._full, self._served = (
                _Arm(_with_pool(arm, engine.model), engine.model) for arm in _arm_configs(config)
            )
        if self._served.engine.storage.fingerprint() != engine.storage.fingerprint():
            raise EngineError(
                "The quality watch has other formats or scales than the engine that it watches: "
                "give it the configuration with which the engine was made."
            )
        self._metrics = metrics
        self._sample_rate = sample_rate
        self._random = random.Random(seed)
        self._waiting: deque[_Sample] = deque()
        self._current: _Sample | None = None
        self._has_failed = False
        self._num_requests = self._num_tokens = self._num_same_top = 0
        self._sum_kl = 0.0
        _logger.info(
            "Quality watch: %g %% of the finished requests of up to %s tokens, in idle time "
            "(%s bytes of KV cache besides the pool)",
            100 * sample_rate,
            f"{self._served.max_model_len:,}",
            f"{self._full.num_bytes + self._served.num_bytes:,}",
        )

    def on_finished(self, request: Request) -> None:
        """Take note of a finished request; of several completions the first is scored."""
        sequence = request.sequences[0]
        if sequence.finish_reason not in ("stop", "length") or not sequence.num_output_tokens:
            return
        if self._random.random() >= self._sample_rate:
            return
        if sequence.num_tokens > min(self._full.max_model_len, self._served.max_model_len):
            self._metrics.on_quality_request("too_long")
            return
        if len(self._waiting) == _MAX_WAITING:
            self._waiting.popleft()
            self._metrics.on_quality_request("dropped")
        answer = tuple(sequence.token_ids[sequence.prompt_len :])
        self._waiting.append(_Sample(request.prompt_token_ids, answer))

    def run_once(self) -> bool:
        """Run one step of one of the two engines, if there is anything to score.

        Returns:
            Whether there is more to do. Errors end the sample, and are logged once.
        """
        try:
            self._advance()
        except Exception as error:
            self._give_up(error)
        return self._current is not None or bool(self._waiting)

    def summary(self) -> QualitySummary:
        """What was found so far; any thread may ask."""
        num_tokens = self._num_tokens
        return QualitySummary(
            sample_rate=self._sample_rate,
            num_requests=self._num_requests,
            num_tokens=num_tokens,
            mean_kl=self._sum_kl / num_tokens if num_tokens else None,
            same_top=self._num_same_top / num_tokens if num_tokens else None,
        )

    def _advance(self) -> None:
        if self._current is None:
            if not self._waiting:
                return
            self._current = self._waiting.popleft()
            self._full.begin(self._current)
            self._served.begin(self._current)
        # In turns, and with equal chunks: the rows that are held are of the same position.
        if self._full.num_steps == self._served.num_steps:
            self._full.step()
            return
        self._served.step()
        if self._full.row is not None and self._served.row is not None:
            self._score(self._full.row, self._served.row)
        if self._served.is_finished:
            self._current = None
            self._num_requests += 1
            self._metrics.on_quality_request("scored")

    def _score(self, full: torch.Tensor, served: torch.Tensor) -> None:
        kl = max(0.0, float(kl_divergence(full[None], served[None])))  # rounding gives -1e-17
        same_top = bool(full.argmax() == served.argmax())
        self._sum_kl += kl
        self._num_same_top += same_top
        self._num_tokens += 1
        self._metrics.on_quality(kl, same_top)

    def _give_up(self, error: Exception) -> None:
        self._full.abort()
        self._served.abort()
        self._current = None
        self._metrics.on_quality_request("failed")
        if not self._has_failed:
            self._has_failed = True
            # Not the error's text, which may name tokens of the request.
            _logger.warning(
                "The quality watch could not score a request (%s); it goes on with others, and "
                "tightkv:quality_watch_requests_total counts further failures.",
                type(error).__name__,
            )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Token ids of a finished request."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class _Arm:
    """One of the two engines, and the last row of logits that it made.

    Attributes:
        row: float32 `[vocab_size]` of the last step; None if it only computed a part of the prompt.
        num_steps: steps of the current sample.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self.engine = LLMEngine(config, model=model)
        self.engine.observe_logits(lambda _sequence, _position, row: self._keep(row))
        self.row: torch.Tensor | None = None
        self.num_steps = 0
        self._request: Request | None = None

    @property
    def max_model_len(self) -> int:
        return self.engine.plan.max_model_len

    @property
    def num_bytes(self) -> int:
        return self.engine.storage.num_bytes

    @property
    def is_finished(self) -> bool:
        return self._request is None or self._request.is_finished

    def begin(self, sample: _Sample) -> None:
        params = SamplingParams(
            forced_token_ids=sample.answer, max_tokens=None, temperature=0, detokenize=False
        )
        self.num_steps = 0
        self._request = self.engine.add_request("sample", sample.prompt, params)

    def step(self) -> None:
        """Raise EngineError if the request has failed."""
        self.row = None
        self.num_steps += 1
        self.engine.step()
        if self._request is not None and self._request.error is not None:
            raise EngineError(self._request.error)

    def abort(self) -> None:
        self.engine.abort_request("sample")
        self.row = None

    def _keep(self, row: torch.Tensor) -> None:
        self.row = row.clone()


def _arm_configs(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """Full precision, then as served; the pools have no size yet."""
    scheduler = config.scheduler
    chunk = min(_CHUNK, scheduler.max_num_batched_tokens)
    small = replace(config, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=chunk))
    full = CacheConfig(block_size=config.cache.block_size, enable_prefix_caching=False)
    served = replace(
        config.cache,
        enable_prefix_caching=False,
        swap_space=0.0,
        swap_dir=None,
        debug_integrity=False,  # of the engine that serves
    )
    return replace(small, cache=full), replace(small, cache=served)


def _with_pool(config: EngineConfig, model: LoadedModel) -> EngineConfig:
    num_bytes = _pool_bytes(config, model)
    return replace(config, cache=replace(config.cache, kv_cache_memory_bytes=num_bytes))


def _pool_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Bytes of a cache for the longest request that is scored."""
    longest = config.model.max_model_len or min(_LONGEST, model.max_position)
    return sequence_bytes(config, model, longest)
