"""The quality watch measures what two engines side by side would, and never disturbs serving."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from server_metrics import server_metrics, value
from tightkv import LLM, SamplingParams
from tightkv.config import EngineConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.request import Request
from tightkv.errors import ConfigError, EngineError
from tightkv.metrics import kl_divergence
from tightkv.metrics.prometheus import ServerMetrics
from tightkv.server import quality_watch
from tightkv.server.quality_watch import QualityWatch, bytes_needed
from tiny_engine import GREEDY, loaded, logits_by_position, prompts
from tiny_models import save_tiny_model

MAX_MODEL_LEN = 128
OUTCOMES = "tightkv:quality_watch_requests_total"


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


class Recorder(ServerMetrics):
    """Keeps each token's figures."""

    def __init__(self) -> None:
        super().__init__("tiny", {}, lambda: pytest.fail("nobody scrapes"))
        self.kl: list[float] = []
        self.same_top: list[bool] = []
        self.outcomes: list[str] = []

    def on_quality(self, kl: float, same_top: bool) -> None:
        self.kl.append(kl)
        self.same_top.append(same_top)

    def on_quality_request(self, outcome: str) -> None:
        self.outcomes.append(outcome)


def config_of(folder: Path, **options: Any) -> EngineConfig:
    given = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 4 << 20, **options}
    return EngineConfig.from_options({"model": str(folder), "max_num_seqs": 4, **given})


def make(
    folder: Path, sample_rate: float = 1.0, seed: int = 0, **options: Any
) -> tuple[LLMEngine, QualityWatch, Recorder]:
    config = config_of(folder, **options)
    engine, metrics = LLMEngine(config, model=loaded(folder)), Recorder()
    watch = QualityWatch(config, engine, metrics, sample_rate=sample_rate, seed=seed)
    return engine, watch, metrics


def serve(
    engine: LLMEngine, inputs: list[list[int]], params: SamplingParams = GREEDY
) -> list[Request]:
    requests = [engine.add_request(str(i), ids, params) for i, ids in enumerate(inputs)]
    while engine.has_unfinished_requests:
        engine.step()
    return requests


def run_all(watch: QualityWatch) -> int:
    """Pieces until there is nothing more."""
    for count in range(1, 10_000):
        if not watch.run_once():
            return count
    raise AssertionError("the watch never ends")


def test_full_precision_differs_in_nothing(folder: Path) -> None:
    engine, watch, metrics = make(folder)
    for request in serve(engine, prompts(2)):
        watch.on_finished(request)
    run_all(watch)
    assert metrics.kl == [0.0] * 32
    assert metrics.same_top == [True] * 32
    assert metrics.outcomes == ["scored", "scored"]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=12)])
def test_int8_is_what_two_llms_give(folder: Path, params: SamplingParams) -> None:
    engine, watch, metrics = make(folder, kv_cache_dtype="int8")
    prompt = prompts(1, 50)[0]
    (request,) = serve(engine, [prompt], params)
    watch.on_finished(request)
    run_all(watch)
    answer = request.sequences[0].token_ids[len(prompt) :]
    rows = []
    for kv_cache_dtype in ("auto", "int8"):
        options = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 4 << 20}
        llm = LLM(loaded(folder), kv_cache_dtype=kv_cache_dtype, max_num_seqs=2, **options)
        forced = SamplingParams(forced_token_ids=answer, max_tokens=None)
        seen = logits_by_position(llm, prompt, forced)
        rows.append(torch.stack([seen[position] for position in sorted(seen)]))
    expected = kl_divergence(*rows)
    assert metrics.kl == expected.tolist()
    assert metrics.same_top == (rows[0].argmax(-1) == rows[1].argmax(-1)).tolist()
    assert 0 < expected.mean() < 0.05
    summary = watch.summary()
    assert (summary.num_requests, summary.num_tokens) == (1, len(answer))
    assert summary.mean_kl == pytest.approx(expected.mean().item())
    assert summary.same_top == sum(metrics.same_top) / len(answer)


def test_a_piece_is_one_small_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watch, metrics = make(llama, kv_cache_dtype="int8")
    steps: list[int] = []
    step = LLMEngine.step

    def counted(self: LLMEngine) -> list[Request]:
        before = self.stats.prompt_tokens + self.stats.generation_tokens
        touched = step(self)
        steps.append(self.stats.prompt_tokens + self.stats.generation_tokens - before)
        return touched

    (request,) = serve(engine, prompts(1, 70))
    watch.on_finished(request)
    monkeypatch.setattr(LLMEngine, "step", counted)
    for count in range(1, 2 * (3 + 15)):
        assert watch.run_once(), "there is more to do"
        assert len(steps) == count
    assert not watch.run_once()
    assert not watch.run_once(), "and nothing afterwards"
    assert len(steps) == 2 * (3 + 15)  # a prompt in three chunks, whose last gives the first token
    assert max(steps) <= 33
    assert len(metrics.kl) == 16


def test_serving_goes_on_between_pieces(llama: Path) -> None:
    engine, watch, metrics = make(llama, kv_cache_dtype="int8")
    (first,) = serve(engine, prompts(1))
    alone = list(first.sequences[0].token_ids)
    watch.on_finished(first)
    for _ in range(7):
        watch.run_once()
    (second,) = serve(engine, prompts(1))
    assert second.sequences[0].token_ids == alone
    run_all(watch)
    assert metrics.outcomes == ["scored"]
    assert len(metrics.kl) == 16


def test_bytes_are_those_that_are_allocated(folder: Path) -> None:
    config = config_of(folder, kv_cache_dtype="int8", v_cache_dtype="fp8", block_size=32)
    engine = LLMEngine(config, model=loaded(folder))
    watch = QualityWatch(config, engine, Recorder(), sample_rate=1.0)
    arms = (watch._full.engine, watch._served.engine)
    assert bytes_needed(config, loaded(folder)) == sum(arm.storage.num_bytes for arm in arms)
    assert [arm.plan.max_model_len for arm in arms] == [MAX_MODEL_LEN] * 2
    assert arms[1].storage.fingerprint() == engine.storage.fingerprint()


def test_without_a_max_model_len_the_watch_has_one(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_watch, "_LONGEST", 64)
    engine, watch, metrics = make(llama, max_model_len=None, kv_cache_dtype="int8")
    for request in serve(engine, [list(range(49)), list(range(48))]):
        watch.on_finished(request)
    assert metrics.outcomes == ["too_long"]
    run_all(watch)
    assert metrics.outcomes == ["too_long", "scored"]


def test_which_requests_are_taken(llama: Path) -> None:
    engine, watch, metrics = make(llama)
    engine.add_request("aborted", prompts(1)[0], GREEDY)
    engine.step()
    (aborted,) = engine.requests
    engine.abort_request("aborted")
    watch.on_finished(aborted)
    assert not watch.run_once()
    sampled = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True)
    watch.on_finished(serve(engine, prompts(1), sampled)[0])
    run_all(watch)
    assert len(metrics.kl) == 5  # the first of its completions


def test_the_choice_is_seeded(llama: Path) -> None:
    def taken(seed: int) -> list[int]:
        engine, watch, _ = make(llama, sample_rate=0.3, seed=seed)
        (request,) = serve(engine, prompts(1))
        counts = []
        for _ in range(60):
            watch.on_finished(request)
            counts.append(len(watch._waiting))
        return counts

    assert taken(1) == taken(1) != taken(2)
    assert 8 <= taken(1)[-1] <= 30


def test_a_full_queue_drops_the_oldest(llama: Path) -> None:
    engine, watch, metrics = make(llama)
    first, second = serve(engine, prompts(2))
    watch.on_finished(first)
    for _ in range(64):
        watch.on_finished(second)
    assert metrics.outcomes == ["dropped"]
    assert {sample.prompt for sample in watch._waiting} == {second.prompt_token_ids}


def test_a_failure_is_logged_once_and_goes_no_further(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, watch, metrics = make(llama, kv_cache_dtype="int8")
    requests = serve(engine, prompts(3))
    caplog.set_level(logging.DEBUG, logger="tightkv")
    caplog.clear()

    def broken(*_: object) -> None:
        raise RuntimeError(f"cannot score {requests[0].prompt_token_ids}")

    for request in requests:
        watch.on_finished(request)
    with monkeypatch.context() as patch:
        patch.setattr(quality_watch, "kl_divergence", broken)
        while "failed" not in metrics.outcomes or len(metrics.outcomes) < 2:
            assert watch.run_once()
    run_all(watch)
    assert metrics.outcomes == ["failed", "failed", "scored"]
    assert len(metrics.kl) == 16
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "RuntimeError" in caplog.text
    assert str(requests[0].prompt_token_ids[:3]).strip("()") not in caplog.text


def test_numbers_that_are_not_finite_end_the_sample(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, watch, metrics = make(llama)
    (request,) = serve(engine, prompts(1))
    watch.on_finished(request)
    arm = watch._served.engine
    execute = arm._runner.execute
    monkeypatch.setattr(arm._runner, "execute", lambda batch: execute(batch) * float("nan"))
    run_all(watch)
    assert metrics.outcomes == ["failed"]
    assert metrics.kl == []


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_rate_outside_its_range(llama: Path, rate: float) -> None:
    with pytest.raises(ConfigError, match=r"kv_quality_sample_rate is .*at most 1"):
        make(llama, sample_rate=rate)


def test_another_configuration_than_the_engines(llama: Path) -> None:
    engine = LLMEngine(config_of(llama, kv_cache_dtype="int8"), model=loaded(llama))
    other = config_of(llama, kv_cache_dtype="fp8")
    with pytest.raises(EngineError, match="the configuration with which the engine was made"):
        QualityWatch(other, engine, Recorder(), sample_rate=1.0)


def test_what_a_scrape_shows(llama: Path) -> None:
    config = config_of(llama, kv_cache_dtype="int8")
    engine, metrics = LLMEngine(config, model=loaded(llama)), server_metrics()
    watch = QualityWatch(config, engine, metrics, sample_rate=1.0)
    watch.on_finished(serve(engine, prompts(1))[0])
    run_all(watch)
    summary = watch.summary()
    assert value(metrics, OUTCOMES, outcome="scored") == summary.num_requests == 1
    assert value(metrics, "tightkv:quality_watch_tokens_total") == summary.num_tokens == 16
    assert summary.mean_kl is not None
    kl_sum = value(metrics, "tightkv:quality_watch_kl_nats_sum")
    assert kl_sum == pytest.approx(16 * summary.mean_kl)


def test_the_log_is_that_of_the_server(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tightkv")
    config = config_of(llama, kv_cache_dtype="int8")
    engine = LLMEngine(config, model=loaded(llama))
    caplog.clear()
    QualityWatch(config, engine, Recorder(), sample_rate=0.01)
    assert [record.message for record in caplog.records] == [
        "Quality watch: 1 % of the finished requests of up to 128 tokens, in idle time "
        f"({bytes_needed(config, loaded(llama)):,} bytes of KV cache besides the pool)"
    ]


def test_only_the_engine_that_serves_is_searched_for_faults(folder: Path) -> None:
    """A sample that fails is not counted as disorder, and disorder not as such a sample."""
    arms = quality_watch._arm_configs(config_of(folder, debug_integrity=True))
    assert [arm.cache.debug_integrity for arm in arms] == [False, False]
