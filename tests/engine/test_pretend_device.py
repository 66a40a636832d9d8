"""The engine on a device: the CPU's tokens, with one copy there and one back in each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pretend_device import (
    PRETEND,
    Counts,
    PretendAccelerator,
    PretendBackend,
    on_pretend_device,
)
from tightkv import LLM, SamplingParams
from tightkv.config import EngineConfig
from tightkv.engine import llm_engine
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.model_runner import ModelRunner
from tightkv.engine.outputs import CompletionOutput
from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.engine.sequence import Sequence
from tightkv.errors import InsufficientMemoryError, UnsupportedModelError
from tiny_engine import prompts, tiny_llm, token_ids
from tiny_models import save_tiny_model

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
POOL = 1 << 20
ONE_COPY_EACH_WAY = {"to device": 1, "to host": 1}
SETTLED = 3  # steps after which every prompt has been read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module", autouse=True)
def counts() -> Iterator[Counts]:
    with on_pretend_device() as counts:
        yield counts


def pretend_llm(folder: Path, accelerator: PretendAccelerator | None = None, **options: Any) -> LLM:
    """An engine on the device."""
    options = {"kv_cache_memory_bytes": POOL, **OPTIONS, **options}
    config = EngineConfig.from_options({"model": str(folder), **options})
    llm = LLM.__new__(LLM)
    llm._ids = itertools.count()
    accelerator = accelerator or PretendAccelerator()
    llm.engine = LLMEngine(config, backend=PretendBackend(), accelerator=accelerator)
    return llm


def counts_of_steps(llm: LLM, counts: Counts, params: SamplingParams) -> list[dict[str, int]]:
    """What each step of four requests copies, waits for and makes."""
    for index, prompt in enumerate(prompts(4, 12)):
        llm.engine.add_request(str(index), prompt, params)
    steps = []
    while llm.engine.has_unfinished_requests:
        before = Counts(counts)
        llm.engine.step()
        steps.append(counts.since(before))
    return steps


def copies(step: dict[str, int]) -> dict[str, int]:
    """Without the new tensors."""
    return {name: count for name, count in step.items() if not name.startswith("new")}


def assert_equal_answers(got: CompletionOutput, expected: CompletionOutput) -> None:
    assert got.token_ids == expected.token_ids
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    assert_equal_logprobs(got.logprobs, expected.logprobs)


def assert_equal_logprobs(got: Any, expected: Any) -> None:
    assert (got is None) == (expected is None)
    for one, other in zip(got or (), expected or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert list(one) == list(other)
            for token in one:
                assert one[token].rank == other[token].rank
                assert math.isclose(one[token].logprob, other[token].logprob, abs_tol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True, "kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "int8", "max_num_batched_tokens": 13, "debug_integrity": True},
        {"kv_cache_dtype": "fp8_e4m3", "enable_chunked_prefill": False},
    ],
)
def test_greedy_tokens_are_those_of_the_cpu(folder: Path, options: dict[str, Any]) -> None:
    accelerator = PretendAccelerator()
    llm = pretend_llm(folder, accelerator, **options)
    # The probe's positions depend on max_model_len.
    on_cpu = tiny_llm(folder, **{**OPTIONS, **options})
    assert token_ids(llm, prompts(5)) == token_ids(on_cpu, prompts(5))
    is_eager = "enforce_eager" in options
    assert accelerator.num_captured == (0 if is_eager else 3)  # 1, 2 and 4 sequences
    assert (accelerator.num_replayed == 0) == is_eager


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral"])
def test_windows(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / model_type, model_type)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("0",)}
    expected = token_ids(tiny_llm(folder, **options), prompts(3))
    assert token_ids(pretend_llm(folder, **options), prompts(3)) == expected


SAMPLED: dict[str, Any] = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True}
WAYS_TO_SAMPLE = [
    SamplingParams(**SAMPLED),
    SamplingParams(**SAMPLED, seed=7, top_p=0.7),
    SamplingParams(**SAMPLED, top_k=5),
    SamplingParams(**SAMPLED, min_p=0.05, logprobs=2),
    SamplingParams(**SAMPLED, top_p=0.9, top_k=40, min_p=0.01, n=2),
    SamplingParams(**SAMPLED, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=9, frequency_penalty=1.0, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=9, logit_bias={5: 30.0, 77: -50.0}, logprobs=0),
    SamplingParams(temperature=0, max_tokens=9, min_tokens=6, stop_token_ids=list(range(200))),
    SamplingParams(temperature=0, logprobs=-1, prompt_logprobs=3, max_tokens=4),
    SamplingParams(temperature=0, forced_token_ids=[1, 2, 3], prompt_logprobs=0),
    SamplingParams(temperature=1, max_tokens=12, structured_outputs=StructuredOutputs(regex="a+b")),
]


def test_every_way_to_sample_together(folder: Path) -> None:
    """With chunks of prompts between decodes, more requests than run at once, and a seed."""
    given = prompts(len(WAYS_TO_SAMPLE), 21)
    options: dict[str, Any] = {"max_num_batched_tokens": 29, "seed": 3}
    expected = tiny_llm(folder, **options).generate(given, WAYS_TO_SAMPLE)
    got = pretend_llm(folder, **options).generate(given, WAYS_TO_SAMPLE)
    for one, other in zip(got, expected, strict=True):
        assert one.error == other.error
        assert_equal_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        for completion, other_completion in zip(one.outputs, other.outputs, strict=True):
            assert_equal_answers(completion, other_completion)


def test_large_batches_are_sampled_in_pieces(folder: Path) -> None:
    given = prompts(4, 12)
    params = SamplingParams(**SAMPLED, top_p=0.9, logprobs=2, presence_penalty=0.5)
    expected = token_ids(pretend_llm(folder), given, params)
    with mock.patch("tightkv.engine.device_sampler._PIECE", 600):  # two rows of the vocabulary
        assert token_ids(pretend_llm(folder), given, params) == expected


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(**SAMPLED, top_p=0.9, top_k=40, min_p=0.01, logprobs=3, prompt_logprobs=2),
    ],
    ids=["greedy", "sampled"],
)
def test_a_step_copies_once_each_way(
    folder: Path, counts: Counts, params: SamplingParams, enforce_eager: bool
) -> None:
    llm = pretend_llm(folder, enforce_eager=enforce_eager, kv_cache_dtype="int8")
    steps = counts_of_steps(llm, counts, params)
    assert len(steps) > 8
    assert [copies(step) for step in steps] == [ONE_COPY_EACH_WAY] * len(steps)


def test_what_changes_logits_takes_a_second_copy(folder: Path, counts: Counts) -> None:
    params = SamplingParams(
        **SAMPLED,
        logit_bias={5: 1.0},
        presence_penalty=0.5,
        min_tokens=4,
        stop_token_ids=[9],
    )
    steps = counts_of_steps(pretend_llm(folder), counts, params)
    assert [copies(step) for step in steps] == [{"to device": 2, "to host": 1}] * len(steps)


def test_a_captured_greedy_step_makes_only_its_tokens(folder: Path, counts: Counts) -> None:
    """Best token and its logit, in 8 and 4 bytes; all else lies in memory that stays."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    steps = counts_of_steps(pretend_llm(folder), counts, params)[SETTLED:]
    assert {(step["new"], step["new bytes"]) for step in steps} <= {
        (2, (8 + 4) * num_seqs) for num_seqs in (1, 2, 3, 4)
    }


def test_a_wait_in_a_step_is_seen(folder: Path, counts: Counts) -> None:
    """The tests above would fail if somebody asked the device for a number."""
    llm = pretend_llm(folder, enforce_eager=True)
    forward = ModelRunner.forward

    def asking(self: ModelRunner, batch: Any) -> torch.Tensor:
        logits = forward(self, batch)
        logits[0, 0].item()
        return logits

    params = SamplingParams(temperature=0, max_tokens=3)
    with mock.patch.object(ModelRunner, "forward", asking):
        steps = counts_of_steps(llm, counts, params)
        assert all(step["wait"] == 1 for step in steps)
        with pytest.raises(UnsupportedModelError, match="start with --enforce-eager"):
            pretend_llm(folder)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: float(x[0]),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: x[torch.tensor([0])],
        lambda x: x + torch.ones(4),
        lambda x: torch.tensor([1.0], device=x.device),
    ],
)
def test_the_device_counts_every_kind_of_wait(ask: Any, counts: Counts) -> None:
    x = torch.ones(4, device=PRETEND)
    before = Counts(counts)
    ask(x)
    assert counts.since(before).keys() & {"wait", "to host", "to device"}


def test_an_observer_may_keep_its_rows(folder: Path) -> None:
    """A captured step leaves its logits where the one before did."""
    kept: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []
    llm = pretend_llm(folder)

    def observe(_sequence: Sequence, _position: int, row: torch.Tensor) -> None:
        kept.append(row)
        copied.append(row.clone())

    llm.engine.observe_logits(observe)
    llm.generate(prompts(2), SamplingParams(temperature=0, max_tokens=6))
    assert len(kept) == 12
    assert all(bool((x == y).all()) for x, y in zip(kept, copied, strict=True))


def test_broken_numbers_end_their_request_alone(folder: Path) -> None:
    llm = pretend_llm(folder)
    weight = next(llm.model.model.get_input_embeddings().parameters())
    weight.data[9].fill_(float("nan"))
    outputs = llm.generate([[1, 2, 3], [4, 9, 5]], SamplingParams(temperature=0, max_tokens=4))
    assert outputs[0].error is None
    assert "NaN or Inf" in str(outputs[1].error)


def test_clips_are_told_without_asking(folder: Path, counts: Counts) -> None:
    llm = pretend_llm(folder, kv_cache_dtype="fp8_e5m2")
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=2))
    before = Counts(counts)
    rates = llm.engine.storage.clip_rates()
    assert not counts.since(before)
    assert rates == llm.engine.stats.clip_rates
    assert set(rates) == {0, 1}


def test_the_pool_is_what_is_left_of_the_memory(folder: Path) -> None:
    llm = pretend_llm(
        folder,
        PretendAccelerator(600 << 20),
        kv_cache_memory_bytes=None,
        max_num_seqs=2048,
        max_num_batched_tokens=2048,
    )
    request, plan = llm.engine.pool_request, llm.engine.plan
    assert request.total_bytes == 600 << 20
    assert request.weight_bytes == llm.model.weight_bytes
    # Logits of all rows in float32 were there at once.
    assert request.peak_bytes > 4 * 2048 * llm.model.vocab_size
    assert request.reserve_bytes > 2048 * llm.model.vocab_size * 4
    left = int(0.9 * (600 << 20)) - request.weight_bytes - request.peak_bytes
    assert 0 <= left - request.reserve_bytes - plan.pool_bytes < plan.bytes_per_block
    assert "graphs, libraries and other processes" in plan.reason


@pytest.mark.parametrize(
    ("where", "doing", "terms"),
    [
        ("load_model", "the weights were loaded", "it has 1.00 GiB"),
        ("probe_factors", "the largest step was tried", "0.9 of all may be taken"),
        ("capture", "decodes were captured", "for the KV cache"),
    ],
)
def test_memory_that_runs_out_is_told_as_a_plan(
    folder: Path, where: str, doing: str, terms: str
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    owner = PretendAccelerator if where == "capture" else llm_engine
    with (
        mock.patch.object(owner, where, side_effect=error),
        pytest.raises(InsufficientMemoryError) as raised,
    ):
        pretend_llm(folder, kv_cache_dtype="int8")
    message = str(raised.value)
    assert f"ran out while {doing}" in message
    assert terms in message
    assert "Three ways out: lower --gpu-memory-utilization" in message
