"""Arms: engines over the same weights, each with another KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tightkv.calibration import calibrate_at_start
from tightkv.config import EngineConfig
from tightkv.engine.arm_spec import ArmSpec, parse_arm
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.outputs import RequestOutput
from tightkv.engine.policy import layer_ranges
from tightkv.engine.pool import pool_bytes
from tightkv.engine.resolve import quiet_log
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import EngineError
from tightkv.evaluation.report import CacheFigures
from tightkv.kernels import Backend
from tightkv.kvcache import KVCacheSpec
from tightkv.models import LoadedModel

__all__ = ["Arm", "ArmSpec", "Arms", "make_arm", "parse_arm"]


class Arm:
    """An engine and its name."""

    def __init__(self, name: str, engine: LLMEngine) -> None:
        self.name = name
        self.engine = engine
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        on_finished: Callable[[int, RequestOutput], None],
    ) -> None:
        """Answer prompts of token ids, together.

        Args:
            prompts: token ids.
            params: one per prompt.
            on_finished: given the prompt's index and its answer, as each is finished.

        Raises:
            RequestError: if a prompt can never be served.
            EngineError: if a request failed.
        """
        index_of: dict[str, int] = {}
        try:
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                self._num_requests += 1
                request_id = f"{self.name}-{self._num_requests}"
                index_of[request_id] = index
                self.engine.add_request(request_id, prompt, param)
            while self.engine.has_unfinished_requests:
                for request in self.engine.step():
                    if request.error is not None:
                        raise EngineError(f"{self.name}: {request.error}")
                    if request.is_finished:
                        on_finished(index_of[request.request_id], request.output())
        except BaseException:
            for request_id in index_of:
                self.engine.abort_request(request_id)
            raise

    def figures(self, base: Arm) -> CacheFigures:
        """What the cache takes, beside the baseline's."""
        specs = self._specs()
        values = sum(
            spec.num_kv_heads * (spec.head_size + spec.value_size) * spec.block_size
            for spec in specs
        )
        return CacheFigures(
            k=self._described(lambda spec: spec.k_format.describe(), "k"),
            v=self._described(lambda spec: spec.v_format.describe(), "v"),
            bytes_per_token=self.engine.plan.bytes_per_token,
            bits_per_value=8 * sum(spec.block_bytes for spec in specs) / values,
            tokens_ratio=base.engine.plan.bytes_per_token / self.engine.plan.bytes_per_token,
        )

    def _specs(self) -> list[KVCacheSpec]:
        return [spec for group in self.engine.storage.groups for spec in group.specs]

    def _described(self, describe: Callable[[KVCacheSpec], str], name: str) -> str:
        """Formats and sources of scales, by layers."""
        layers: dict[str, list[int]] = {}
        for spec in self._specs():
            source = getattr(self.engine.policy[spec.layer_idx], name).source
            text = f"{describe(spec)}, from {source}" if source else describe(spec)
            layers.setdefault(text, []).append(spec.layer_idx)
        if len(layers) == 1:
            return next(iter(layers))
        return "; ".join(f"layers {layer_ranges(of)}: {text}" for text, of in layers.items())


@dataclass(frozen=True, slots=True)
class Arms:
    """One baseline and what is compared with it; all pools hold as many tokens in all layers.

    So all arms schedule alike: the same requests are in the same steps, unless answers differ or
    a pool is full and windows share it in other pages.
    """

    base: Arm
    others: tuple[Arm, ...]

    def __iter__(self) -> Iterator[Arm]:
        return iter((self.base, *self.others))

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        model: LoadedModel,
        base: ArmSpec,
        others: Sequence[ArmSpec],
        num_tokens: int,
        backend: Backend | None = None,
    ) -> Arms:
        """An engine for each.

        Args:
            config: of everything but the cache's precision.
            model: which all share.
            base: the baseline.
            others: what is compared with it.
            num_tokens: size of each pool.
            backend: kernels; default: those of the device.

        Raises:
            ConfigError, ScaleError: as the engine would; the arm is named.
        """

        def make(spec: ArmSpec) -> Arm:
            return make_arm(spec, config, model, num_tokens, backend)

        return cls(make(base), tuple(map(make, others)))


def make_arm(
    spec: ArmSpec,
    config: EngineConfig,
    model: LoadedModel,
    num_tokens: int,
    backend: Backend | None = None,
) -> Arm:
    """One arm; arguments and errors as in `Arms.make`."""
    config = replace(config, cache=spec.cache_config(config.cache))
    with quiet_log():
        config, _ = calibrate_at_start(config, model)
        num_bytes = pool_bytes(config, model, num_tokens)
        cache = replace(config.cache, kv_cache_memory_bytes=num_bytes)
        return Arm(spec.name, LLMEngine(replace(config, cache=cache), model=model, backend=backend))
