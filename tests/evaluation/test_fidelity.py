"""Fidelity: exact where nothing differs, large where something is broken, the same when resumed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outliers import inject_outliers
from tightkv import LLM, SamplingParams, get_kv_cache_scales
from tightkv.calibration.progress import no_progress
from tightkv.config import EngineConfig, EvaluationConfig
from tightkv.errors import EngineError, RequestError
from tightkv.evaluation.arms import Arms, make_arm, parse_arm
from tightkv.evaluation.fidelity import (
    decode_parts,
    measure_fidelity,
    measure_layer_groups,
    measure_noise_floor,
)
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.report import FidelityPass, PassName
from tightkv.kernels import (
    AttentionBatch,
    AttentionParams,
    Backend,
    LayerCache,
    select_backend,
)
from tightkv.metrics import DivergenceFigures, kl_divergence
from tightkv.models import LoadedModel
from tiny_engine import loaded, logits_by_position, prompts
from tiny_models import save_tiny_model, tiny_model

CONFIG = EngineConfig.from_options(
    {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
)
POOL_TOKENS = 1024
BUCKETS = (0, 64, 128, 512)
WINDOWS = prompts(2, 150)
TEXTS = ["The lighthouse stood on the rock, and the sea went round it all night long. " * 20]

Found = dict[str, dict[PassName, FidelityPass]]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    return loaded(save_tiny_model(folder, request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def make_arms(model: LoadedModel, *names: str, backend: Backend | None = None) -> Arms:
    base = replace(parse_arm("auto"), name="baseline")
    return Arms.make(CONFIG, model, base, [parse_arm(name) for name in names], POOL_TOKENS, backend)


def measure(arms: Arms, windows: Sequence[Sequence[int]] = WINDOWS, **options: Any) -> Found:
    journal = options.pop("journal", None) or Journal(None, "test")
    progress = options.pop("progress", no_progress)
    return measure_fidelity(arms, windows, BUCKETS, journal, progress)


def assert_idle(arms: Arms) -> None:
    for arm in arms:
        assert not arm.engine.has_unfinished_requests
        arm.engine.manager.check_integrity()
        assert arm.engine.manager.num_sequences == 0


def test_the_baseline_against_itself(model: LoadedModel) -> None:
    arms = make_arms(model, "float32")
    for of in measure(arms)["float32"].values():
        figures = of.overall
        assert figures.kld.maximum == figures.rms_delta_p == 0
        assert figures.same_top_p == figures.ppl_ratio == 1
        assert figures.ppl == figures.ppl_base
    assert_idle(arms)


def test_prefill_is_what_two_llms_give(model: LoadedModel) -> None:
    found = measure(make_arms(model, "int8"), WINDOWS[:1])["int8"]["prefill"].overall
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0)
    rows = []
    for dtype in ("auto", "int8"):
        llm = LLM(model, kv_cache_dtype=dtype, kv_cache_memory_bytes=4 << 20, max_model_len=256)
        seen = logits_by_position(llm, WINDOWS[0], params)
        rows.append(torch.stack([seen[position] for position in range(len(WINDOWS[0]) - 1)]))
    kl = kl_divergence(*rows)
    following = torch.tensor(WINDOWS[0][1:])[:, None]
    nll = -torch.log_softmax(rows[1].double(), -1).gather(1, following)
    assert found.num_tokens == len(kl) == 149
    assert found.kld.mean == pytest.approx(kl.mean().item(), rel=1e-6)
    assert found.kld.maximum == pytest.approx(kl.max().item(), rel=1e-6)
    assert found.ppl == pytest.approx(nll.mean().exp().item(), rel=1e-6)
    assert found.same_top_p == (rows[0].argmax(-1) == rows[1].argmax(-1)).double().mean().item()
    assert 0 < found.kld.mean < 0.05


def test_both_passes_say_the_same_of_the_same_tokens(llama: LoadedModel) -> None:
    """A row has the same bits in prefill and in decode; short windows are decoded as a whole."""
    found = measure(make_arms(llama, "int8"))["int8"]
    assert [len(window) for window in WINDOWS] == [150, 155]
    assert found["decode"] == found["prefill"]
    assert found["decode"].overall.num_tokens == 149 + 154


def test_buckets(llama: LoadedModel) -> None:
    arms = make_arms(llama, "int8")
    found = measure_fidelity(arms, WINDOWS, (32, 64, 150), Journal(None, "test"), no_progress)
    buckets = found["int8"]["prefill"].buckets
    assert [(of.begin, of.end) for of in buckets] == [(32, 64), (64, 150), (150, 155)]
    # Of 150 tokens the last has 149 before it.
    assert [of.figures.num_tokens for of in buckets] == [2 * 32, 2 * 86, 5]
    overall = found["int8"]["prefill"].overall
    assert overall.num_tokens == 149 + 154
    begins_early = measure_fidelity(arms, WINDOWS, BUCKETS, Journal(None, "test"), no_progress)
    parts = begins_early["int8"]["prefill"].buckets
    assert [(of.begin, of.end) for of in parts] == [(0, 64), (64, 128), (128, 512)]
    sums = [of.figures.kld.mean * of.figures.num_tokens for of in parts]
    assert sum(sums) == pytest.approx(overall.kld.mean * overall.num_tokens)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_tokens", [2, 17, 100, 2048, 8000])
@pytest.mark.parametrize("buckets", [(0, 512, 1024, 2048), (0, 16, 64, 80, 4096), (500,), ()])
def test_parts(num_tokens: int, block_size: int, buckets: tuple[int, ...]) -> None:
    parts = decode_parts(num_tokens, buckets, block_size)
    tokens = [token for part in parts for token in part]
    assert tokens == sorted(set(tokens))
    assert all(0 < token < num_tokens for token in tokens)
    assert all(part.start % block_size == 1 for part in parts)
    edges = [*(edge for edge in buckets if edge < num_tokens), num_tokens]
    for begin, end in itertools.pairwise(edges):
        assert any(begin <= token < end for token in tokens)
    assert len(tokens) <= (16 + len(buckets)) * max(32, block_size)
    if num_tokens <= 100 and buckets != (500,):
        assert tokens == list(range(1, num_tokens))


def test_parts_are_spread() -> None:
    parts = decode_parts(2048, (0, 512, 1024, 2048), 16)
    assert [part.start for part in parts] == list(range(1, 2048, 128))
    assert {len(part) for part in parts} == {32}


class Interruption(BaseException):
    """As of Ctrl-C."""


@pytest.mark.parametrize("num_calls", [2, 9, 40])
def test_resumed_is_uninterrupted(llama: LoadedModel, tmp_path: Path, num_calls: int) -> None:
    expected = measure(make_arms(llama, "int8", "fp8_e5m2"))
    calls: list[tuple[int, int]] = []

    def interrupt(_stage: str, done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == num_calls:
            raise Interruption

    path = tmp_path / "progress.jsonl"
    arms = make_arms(llama, "int8", "fp8_e5m2")
    with pytest.raises(Interruption):
        measure(arms, journal=Journal(path, "run"), progress=interrupt)
    assert_idle(arms)
    # Other engines, whose prefix caches are empty, and what the file has kept.
    journal = Journal(path, "run")
    assert measure(make_arms(llama, "int8", "fp8_e5m2"), journal=journal) == expected
    assert measure(arms, journal=Journal(path, "run")) == expected


def test_progress_ends_at_its_total(llama: LoadedModel) -> None:
    calls: list[tuple[int, int]] = []
    journal = Journal(None, "test")

    def note(_stage: str, done: int, total: int) -> None:
        calls.append((done, total))

    arms = make_arms(llama, "int8")
    measure(arms, journal=journal, progress=note)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) > 20
    calls.clear()
    measure(arms, journal=journal, progress=note)
    assert len(calls) == 4
    assert calls[-1][0] == calls[-1][1]


def test_noise_floor(model: LoadedModel) -> None:
    """Steps of the two do not end at the same tokens."""
    arms = make_arms(model)
    for budget in (7, 48, 200):
        scheduler = replace(CONFIG.scheduler, max_num_batched_tokens=budget)
        spec = replace(parse_arm("auto"), name="other cut")
        other = make_arm(spec, replace(CONFIG, scheduler=scheduler), model, POOL_TOKENS)
        figures = measure_noise_floor(arms.base, other, WINDOWS[0], Journal(None, "test"))
        assert figures.num_tokens == 149
        assert figures.kld.maximum == 0
        assert figures.same_top_p == 1


def test_layer_groups(llama: LoadedModel) -> None:
    """Each group costs something; groups share one journal."""
    journal, base = Journal(None, "test"), parse_arm("auto")
    found: dict[str, DivergenceFigures] = {}
    for skipped in ("0", "1", "0-1"):
        spec = replace(parse_arm("fp8_e5m2"), name=f"without {skipped}", skip_layers=(skipped,))
        arms = Arms.make(CONFIG, llama, base, [spec], POOL_TOKENS)
        found |= measure_layer_groups(arms, WINDOWS, journal, no_progress)
    means = {name: figures.kld.mean for name, figures in found.items()}
    assert means.pop("without 0-1") == 0
    assert all(mean > 0 for mean in means.values())
    assert len(set(means.values())) == 2


@dataclass(frozen=True)
class ScalesIgnoredAtDecode:
    """The real kernels, but for scales where each sequence of the batch has one query token.

    Attributes:
        decodes: whether each call was such.
    """

    real: Backend
    name: str = "broken"
    reason: str = "asked for"
    decodes: list[bool] = field(default_factory=list)

    def check_layout(self, layout: Any) -> None:
        self.real.check_layout(layout)

    def reshape_and_cache(self, *arguments: Any) -> None:
        self.real.reshape_and_cache(*arguments)

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        self.decodes.append(len(query) == len(batch.seq_lens))
        if self.decodes[-1]:
            cache = self.without_scales(cache)
        return self.real.paged_attention(query, cache, batch, params)

    @staticmethod
    def without_scales(cache: LayerCache) -> LayerCache:
        blocks = cache.blocks.clone()
        for scales in (cache.layout.k_scales(blocks), cache.layout.v_scales(blocks)):
            if scales is not None:
                scales.fill_(1 / 64)
        return replace(
            cache,
            blocks=blocks,
            k_scale=None if cache.k_scale is None else torch.ones_like(cache.k_scale),
            v_scale=None if cache.v_scale is None else torch.ones_like(cache.v_scale),
        )


@pytest.mark.parametrize("dtype", ["int8", "int8_per_token_head"])
def test_a_kernel_that_is_broken_at_decode(model: LoadedModel, dtype: str) -> None:
    backend = ScalesIgnoredAtDecode(select_backend(torch.device("cpu")))
    whole = measure(make_arms(model, dtype))[dtype]
    broken = measure(make_arms(model, dtype, backend=backend))[dtype]
    assert broken["prefill"] == whole["prefill"]
    limits = EvaluationConfig()
    for of in (*whole.values(), broken["prefill"]):
        assert of.overall.kld.mean < limits.max_kld
    assert broken["decode"].overall.kld.mean > 10 * whole["decode"].overall.kld.mean
    assert broken["decode"].overall.kld.mean > limits.max_kld
    assert broken["decode"].overall.same_top_p < limits.min_top1
    # Once decode has begun there is nothing else: all that precedes a part is in the cache.
    num_layers = len(make_arms(model).base.engine.policy)
    assert sum(backend.decodes) % num_layers == 0
    assert sum(backend.decodes) > 2 * num_layers * 32


def test_outliers(tmp_path: Path) -> None:
    """One static scale per tensor is ruined by them; channel factors are not."""
    folder = save_tiny_model(tmp_path / "llama")
    twisted = tiny_model()
    inject_outliers(twisted, [0, 1], 300.0)
    twisted.save_pretrained(folder)
    model, scales = loaded(folder), tmp_path / "scales.json"
    get_kv_cache_scales(
        model,
        TEXTS,
        scales,
        static=True,
        granularity="tensor",
        num_samples=8,
        max_seq_len=64,
    )
    found = measure(make_arms(model, f"int8@{scales}", "int8"))
    for name in ("prefill", "decode"):
        per_tensor, two_factor = (of[name].overall for of in found.values())
        assert per_tensor.kld.mean > 0.1
        assert two_factor.kld.mean < 0.02
        assert per_tensor.same_top_p < 0.9 < two_factor.same_top_p


def test_a_failing_arm_is_named(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = make_arms(llama, "int8")
    (other,) = arms.others

    def fail() -> None:
        raise EngineError("A step of the engine failed.")

    monkeypatch.setattr(other.engine, "step", fail)
    with pytest.raises(EngineError, match=r"int8: A step of the engine failed\."):
        measure(arms)
    monkeypatch.undo()
    assert_idle(arms)


def test_nothing_to_predict(llama: LoadedModel) -> None:
    with pytest.raises(RequestError, match="No window of the text has two tokens"):
        measure(make_arms(llama, "int8"), [[5], []])
    found = measure(make_arms(llama, "int8"), [[5], [5, 6]])
    assert found["int8"]["decode"].overall.num_tokens == 1
