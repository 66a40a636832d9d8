"""What a request can ask of the engine, and what happens when it asks for the impossible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv import LLM, LayerScales, SamplingParams, TensorScale, TightKVError
from tightkv.engine.model_runner import ModelRunner
from tightkv.engine.scheduler import MAX_PROMPT_LOGPROBS_ROWS
from tightkv.engine.sequence import Sequence
from tightkv.errors import (
    ConfigError,
    EngineError,
    InsufficientMemoryError,
    PromptTooLongError,
    RequestError,
    ScaleError,
    UnsupportedModelError,
)
from tightkv.models import probe_geometry, use_paged_attention
from tiny_engine import GREEDY, prompts, tiny_llm, token_ids
from tiny_models import EOS, VOCAB_SIZE, save_tiny_model, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return tiny_llm(folder)


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


def test_n_sequences_share_the_full_blocks_of_their_prompt(folder: Path) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    for prefix_caching in (True, False):
        llm = tiny_llm(folder, enable_prefix_caching=prefix_caching)
        output = llm.generate(prompts(1, 40), params)[0]
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert len({completion.token_ids for completion in output.outputs}) == 3
        assert llm.engine.stats.prefix_cache_hits == 2 * 32
        again = llm.generate(prompts(1, 40), params)[0]
        assert again.outputs == output.outputs
        assert again.num_cached_tokens == (32 if prefix_caching else 0)


def test_seed(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=16, ignore_eos=True)
    first, second = (llm.generate(prompts(1), params)[0].outputs for _ in range(2))
    assert first == second
    other = llm.generate(prompts(1), SamplingParams(seed=2, max_tokens=16, ignore_eos=True))
    assert other[0].outputs[0].token_ids != first[0].token_ids
    unseeded = [
        llm.generate(prompts(1), SamplingParams(max_tokens=16, ignore_eos=True))[0].outputs[0]
        for _ in range(2)
    ]
    assert unseeded[0].token_ids != unseeded[1].token_ids


def test_prompt_logprobs_are_those_of_transformers(folder: Path) -> None:
    prompt = prompts(1, 50)[0]
    llm = tiny_llm(folder)
    llm.generate([prompt], GREEDY)  # the prompt is in the prefix cache now, and must be skipped
    output = llm.generate(
        [prompt], SamplingParams(temperature=0, prompt_logprobs=2, logprobs=1, max_tokens=1)
    )[0]
    expected = torch.log_softmax(tiny_model()(torch.tensor([prompt])).logits[0], dim=-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.num_cached_tokens == 0
    for position, top in enumerate(output.prompt_logprobs[1:], start=1):
        assert top is not None
        token = prompt[position]
        want = expected[position - 1, token].item()
        assert top[token].logprob == pytest.approx(want, abs=1e-4)
        assert len(top) in (2, 3)
    last = output.outputs[0].logprobs
    assert last is not None
    best = int(expected[-1].argmax())
    assert last[0][best].rank == 1
    assert last[0][best].logprob == pytest.approx(expected[-1, best].item(), abs=1e-4)


def test_prompt_logprobs_survive_preemption(folder: Path) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=40, ignore_eos=True)
    roomy = tiny_llm(folder, pool_tokens=2048).generate(prompts(4, 60), params)
    tight = tiny_llm(folder, pool_tokens=192)
    assert tight.generate(prompts(4, 60), params) == roomy
    assert tight.engine.stats.num_preemptions > 0


def test_forced_tokens_are_taken_and_end_the_sequence(llm: LLM) -> None:
    forced = [5, EOS, 7, 9]
    output = llm.generate(prompts(1), SamplingParams(forced_token_ids=forced, max_tokens=None))[0]
    assert list(output.outputs[0].token_ids) == forced
    assert output.outputs[0].finish_reason == "length"


def test_stop_token_and_stop_string(llm: LLM) -> None:
    greedy = llm.generate(prompts(1), GREEDY)[0].outputs[0]
    stop = greedy.token_ids[5]
    first = greedy.token_ids.index(stop)
    by_token = llm.generate(
        prompts(1), SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop])
    )[0].outputs[0]
    assert by_token.token_ids == greedy.token_ids[: first + 1]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", stop)
    text = greedy.text
    needle = text[8:11]
    by_text = llm.generate(
        prompts(1), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=needle)
    )[0].outputs[0]
    assert by_text.text == text[: text.index(needle)]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", needle)


def test_eos_ends_a_sequence_unless_ignored(llm: LLM) -> None:
    bias = {EOS: 100.0}
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias=bias)
    ended = llm.generate(prompts(1), params)[0].outputs[0]
    assert ended.token_ids == (EOS,)
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
    ignored = llm.generate(
        prompts(1), SamplingParams(temperature=0, max_tokens=5, logit_bias=bias, ignore_eos=True)
    )[0].outputs[0]
    assert ignored.token_ids == (EOS,) * 5
    late = llm.generate(
        prompts(1), SamplingParams(temperature=0, max_tokens=5, min_tokens=3, logit_bias=bias)
    )[0].outputs[0]
    assert late.token_ids.index(EOS) == 3


def test_an_answer_ends_at_max_model_len(folder: Path) -> None:
    llm = tiny_llm(folder, max_model_len=64)
    output = llm.generate(
        prompts(1, 50), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )[0]
    assert len(output.outputs[0].token_ids) == 14
    assert output.outputs[0].finish_reason == "length"


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "user: hi\nassistant: "
    assert output.outputs == llm.generate("user: hi\nassistant: ", GREEDY)[0].outputs


def test_an_interrupted_step_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(folder)
    finish, calls = Sequence.finish, []

    def interrupted(self: Sequence, *arguments: Any, **named: Any) -> None:
        finish(self, *arguments, **named)
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sequence, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(3), SamplingParams(max_tokens=1))
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests
    assert token_ids(llm, prompts(1)) == token_ids(tiny_llm(folder), prompts(1))


def test_a_step_that_breaks_ends_its_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(folder, max_num_seqs=1)
    running = llm.engine.add_request("a", prompts(1)[0], GREEDY)
    waiting = llm.engine.add_request("b", prompts(1)[0], GREEDY)
    monkeypatch.setattr(ModelRunner, "execute", lambda *_: 1 / 0)
    with pytest.raises(EngineError) as caught:
        llm.engine.step()
    assert "division by zero" in one_sentence(caught.value)
    assert running.output().error == str(caught.value)
    monkeypatch.undo()
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert waiting.output().error is None
    assert llm.engine.manager.num_sequences == 0


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("phimoe", {"sliding_window": 8}),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
)
def test_windows_that_only_the_mask_knows_are_refused(
    model_type: str, settings: dict[str, Any]
) -> None:
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4}
    model = tiny_model(model_type, **sizes, **settings)
    use_paged_attention(model)
    with pytest.raises(UnsupportedModelError) as caught:
        probe_geometry(model)
    assert "window" in one_sentence(caught.value)


def test_prompt_logprobs_of_many_requests_share_the_rows_of_a_step(folder: Path) -> None:
    llm = tiny_llm(folder, max_num_batched_tokens=512)
    params = SamplingParams(prompt_logprobs=0, max_tokens=1)
    for length in (60, 100):
        llm.engine.add_request(str(length), prompts(1, length)[0], params)
    chunks = llm.engine.scheduler.schedule()
    assert sum(chunk.num_tokens for chunk in chunks) == MAX_PROMPT_LOGPROBS_ROWS


def test_abort_frees_everything(folder: Path) -> None:
    llm = tiny_llm(folder)
    running = llm.engine.add_request("a", prompts(1)[0], GREEDY)
    llm.engine.add_request("b", prompts(2)[1], GREEDY)
    llm.engine.step()
    llm.engine.abort_request("a")
    llm.engine.abort_request("never heard of")
    assert running.output().outputs[0].finish_reason == "abort"
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert llm.engine.manager.num_sequences == 0
    llm.engine.manager.check_integrity()


def broken_key(llm: LLM, token: int) -> Callable[[], None]:
    """Make K of one token id NaN in the first layer; returns what undoes it."""
    weight = next(llm.model.model.get_input_embeddings().parameters())
    kept = weight[token].clone()
    weight[token] = float("nan")

    def undo() -> None:
        weight[token] = kept

    return undo


def test_nan_in_k_fails_that_request_alone(folder: Path) -> None:
    llm = tiny_llm(folder)
    good = prompts(3)
    good = [[token for token in prompt if token != 7] for prompt in good]
    expected = token_ids(llm, good)
    llm = tiny_llm(folder)
    undo = broken_key(llm, 7)
    bad = [*good[0][:20], 7, *good[0][20:]]
    outputs = llm.generate([good[0], bad, good[1], good[2]], GREEDY)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error is not None
    assert "NaN" in outputs[1].error
    rest = [outputs[0], outputs[2], outputs[3]]
    assert [list(output.outputs[0].token_ids) for output in rest] == expected
    undo()
    # Nothing of the failed request is found again.
    cured = llm.generate([bad], GREEDY)[0]
    assert cured.error is None
    fresh = tiny_llm(folder).generate([bad], GREEDY)[0]
    assert cured.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert llm.engine.manager.num_free_blocks == llm.engine.manager.num_blocks


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "no tokens"),
        ([VOCAB_SIZE], {}, str(VOCAB_SIZE)),
        ([1] * 1000, {}, "1000 tokens"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([1], {"forced_token_ids": [1] * 600, "max_tokens": None}, "600"),
        ([1.5, 2], {}, "whole numbers"),
    ],
)
def test_impossible_requests_are_refused_at_once(
    llm: LLM, prompt: list[int], params: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([prompts(1)[0], prompt], SamplingParams(**params))  # type: ignore[arg-type]
    assert words in one_sentence(caught.value)
    assert not llm.engine.has_unfinished_requests
    assert token_ids(llm, prompts(1))


def test_priority_is_refused_where_it_would_change_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts(2), GREEDY, priority=[0, 1])
    assert "--scheduling-policy priority" in one_sentence(caught.value)
    assert not llm.engine.has_unfinished_requests
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts(2), GREEDY, priority=[0])
    assert "2 prompts and 1 priorities" in one_sentence(caught.value)
    assert len(llm.generate(prompts(2), GREEDY, priority=[0, 0])) == 2


def test_the_lowest_priority_is_answered_first(folder: Path) -> None:
    llm = tiny_llm(folder, max_num_seqs=1, scheduling_policy="priority")
    finished: list[str] = []
    outputs = llm.generate(
        prompts(4),
        GREEDY,
        priority=[0, 3, -1, 0],
        on_finished=lambda output: finished.append(output.request_id),
    )
    assert finished == [outputs[index].request_id for index in (2, 0, 3, 1)]
    expected = tiny_llm(folder).generate(prompts(4), GREEDY)
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]


@pytest.mark.parametrize("chunked", [True, False])
def test_what_is_not_refused_can_be_served(folder: Path, chunked: bool) -> None:
    """A pool shorter than the model, and requests that go to its end, n of them at once."""
    llm = tiny_llm(folder, pool_tokens=100, enable_chunked_prefill=chunked, debug_integrity=True)
    limit = llm.engine.plan.max_model_len
    assert limit == 112
    for params in (
        SamplingParams(max_tokens=None, ignore_eos=True, n=3),
        SamplingParams(temperature=0, max_tokens=10**9, ignore_eos=True, min_tokens=500),
        SamplingParams(forced_token_ids=[1] * (limit - 40), max_tokens=None),
    ):
        for output in llm.generate([prompts(1, 40)[0]] * 3, params):
            assert {len(completion.token_ids) for completion in output.outputs} == {limit - 40}
    for length, forced in ((limit, None), (limit - 1, [1, 1])):
        with pytest.raises(PromptTooLongError) as caught:
            llm.generate([[1] * length], SamplingParams(forced_token_ids=forced, max_tokens=None))
        assert str(limit) in one_sentence(caught.value)


def test_a_name_in_use_is_refused(folder: Path) -> None:
    llm = tiny_llm(folder)
    llm.engine.add_request("a", [1, 2], GREEDY)
    with pytest.raises(RequestError) as caught:
        llm.engine.add_request("a", [1, 2], GREEDY)
    assert "'a'" in one_sentence(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"kv_cache_dtype": "int7"}, ConfigError, "int7"),
        ({"kv_cache_dtyp": "int8"}, ConfigError, "kv_cache_dtype"),
        (
            {"kv_cache_dtype": "int8", "k_cache_dtype": "auto", "v_cache_dtype": "auto"},
            ConfigError,
            "contradicted",
        ),
        ({"block_size": 24}, ConfigError, "multiple of 16"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization"),
        ({"device": "gpu"}, ConfigError, "'gpu'"),
        ({"scheduling_policy": "lifo"}, ConfigError, "fcfs or priority"),
        ({"max_num_seqs": "4"}, ConfigError, "max_num_seqs"),
        ({"kv_cache_memory_bytes": 2e6}, ConfigError, "kv_cache_memory_bytes"),
        (
            {
                "kv_cache_memory_bytes": 2**50,
                "max_num_seqs": 10**6,
                "max_num_batched_tokens": 10**6,
            },
            InsufficientMemoryError,
            "available",
        ),
        ({"enable_lora": True}, ConfigError, "LoRA"),
        ({"kv_cache_memory_bytes": -1}, ConfigError, "kv_cache_memory_bytes"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, ConfigError, "max_num_batched_tokens"),
        ({"kv_cache_dtype_skip_layers": ("9",)}, ConfigError, "0-1"),
        ({"kv_cache_dtype_skip_layers": ("x",)}, ConfigError, "'x'"),
        ({"max_model_len": 4096}, ConfigError, "512"),
        (
            {"max_model_len": 512, "kv_cache_memory_bytes": 4096},
            InsufficientMemoryError,
            "--kv-cache-memory-bytes",
        ),
        ({"kv_cache_memory_bytes": 100}, InsufficientMemoryError, "--kv-cache-memory-bytes"),
    ],
)
def test_wrong_options(
    folder: Path, options: dict[str, object], kind: type[TightKVError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        LLM(str(folder), **options)
    assert words in one_sentence(caught.value)


def test_scales_that_do_not_fit(folder: Path) -> None:
    scale = TensorScale(torch.tensor(0.1))
    both = LayerScales(scale, scale)
    wrong: list[tuple[dict[int, LayerScales], dict[str, object]]] = [
        ({0: both}, {"kv_cache_dtype": "int8"}),
        ({0: both, 1: both, 2: both}, {"kv_cache_dtype": "int8"}),
        ({0: both, 1: both}, {"kv_cache_dtype": "bfloat16"}),
        ({0: both, 1: LayerScales(k=scale)}, {"kv_cache_dtype": "int8"}),
        ({0: both, 1: both}, {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("1",)}),
        (
            {0: both, 1: LayerScales(TensorScale(torch.ones(5)), scale)},
            {"kv_cache_dtype": "int8"},
        ),
    ]
    for scales, options in wrong:
        with pytest.raises(ScaleError) as caught:
            LLM(str(folder), kv_cache_scales=scales, kv_cache_memory_bytes=1 << 20, **options)
        one_sentence(caught.value)


def test_formats_by_layer_and_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tightkv")
    llm = LLM(
        str(folder),
        k_cache_dtype="int8",
        v_cache_dtype="fp8_e5m2",
        kv_cache_dtype_skip_layers=("-1",),
        kv_cache_memory_bytes=1 << 20,
    )
    first, last = (spec for group in llm.engine.storage.groups for spec in group.specs)
    assert (first.k_format.name, first.v_format.name) == ("int8", "fp8_e5m2")
    assert (last.k_format.name, last.v_format.name) == ("float32", "float32")
    tokens = llm.engine.plan.num_tokens
    assert f"CPU KV cache size: {tokens:,} tokens" in caplog.text
    assert "Maximum concurrency for 512 tokens per request: " in caplog.text
    assert "K int8 (static per channel, dynamic per token and head), V fp8_e5m2" in caplog.text
    assert "scale 1" in caplog.text
    assert "Kernel: C++" in caplog.text


def test_predicted_bytes_are_allocated_bytes(folder: Path) -> None:
    for dtype in ("auto", "int8", "fp8_e4m3"):
        llm = LLM(str(folder), kv_cache_dtype=dtype, kv_cache_memory_bytes=1 << 20)
        assert llm.engine.plan.pool_bytes == llm.engine.storage.num_bytes
        assert llm.engine.plan.pool_bytes <= 1 << 20


def test_pool_without_a_budget_follows_the_memory(folder: Path) -> None:
    llm = LLM(str(folder), max_num_seqs=3, max_model_len=100)
    assert llm.engine.plan.num_blocks == 3 * 7  # never more than can be used
    assert llm.engine.config.cache.kv_cache_memory_bytes == llm.engine.storage.num_bytes
    assert llm.engine.config.model.max_model_len == 100
    assert llm.engine.config.cache.kv_cache_dtype == "float32"
