"""A load for any OpenAI server, with vLLM's definitions of what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from tightkv.benchmark.arrivals import check_rate, draw_arrivals, scaled_arrivals
from tightkv.benchmark.data import (
    BenchRequest,
    DatasetConfig,
    Vocabulary,
    length_factor,
    make_requests,
)
from tightkv.benchmark.http_client import Address, HttpError, Response, send
from tightkv.benchmark.statistics import Figures, RequestTiming, summarize
from tightkv.benchmark.stream import read_timing
from tightkv.calibration.progress import Progress, no_progress
from tightkv.errors import ConfigError, EngineError

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "LoadConfig",
    "ServeReport",
    "ServeRun",
    "ServedModel",
    "Target",
    "bench_serve",
    "find_model",
]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_QUICK_SECONDS = 30.0
_SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and what they all say.

    Attributes:
        address: of the server.
        model: its name there.
        endpoint: `COMPLETIONS` or `CHAT`.
        headers: of each request, as the key.
        body: further fields of each request, as temperature.
        ignore_eos: ask for answers of exactly the given length; the server must know the field.
        timeout: seconds after which a request has failed.
    """

    address: Address
    model: str
    endpoint: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    timeout: float = 6 * 3600.0

    def payload(self, request: BenchRequest) -> bytes:
        """The body of a streaming request."""
        asked: dict[str, Any] = {"prompt": request.text}
        if self.endpoint == CHAT:
            asked = {"messages": [{"role": "user", "content": request.text}]}
        document = {
            "model": self.model,
            **asked,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.body,
        }
        return json.dumps(document).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """When requests are sent.

    Attributes:
        request_rate: per second; infinite: all at once, or at the trace's own times.
        burstiness: shape of the gaps; 1 is a Poisson process.
        max_concurrency: most requests on their way; None: no limit.
        self_timed: send the requests of a trace at its times.
        arrival_scale: factor of a trace's times.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    self_timed: bool = True
    arrival_scale: float = 1.0

    def check(self) -> None:
        """Refuse values that make no load.

        Raises:
            ConfigError: names the flag.
        """
        check_rate(self.request_rate, self.burstiness)
        scaled_arrivals([0.0], scale=self.arrival_scale)
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(
                f"--max-concurrency is {self.max_concurrency}: give a number from 1 on."
            )

    def arrivals(self, requests: Sequence[BenchRequest], seed: int) -> list[float]:
        """Seconds after the start at which each request is sent."""
        own = [each.arrival for each in requests if each.arrival is not None]
        if self.self_timed and len(own) == len(requests):
            return scaled_arrivals(own, self.request_rate, self.arrival_scale)
        return draw_arrivals(len(requests), self.request_rate, self.burstiness, seed)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of its first model, or of the one asked for.

    Attributes:
        root: where the server has it from; "" if it does not tell.
        max_model_len: longest sequence; None if it does not tell.
    """

    name: str
    root: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ServeRun:
    """One load.

    Attributes:
        load: how it was sent.
        figures: what was measured.
    """

    load: LoadConfig
    figures: Figures

    @property
    def errors(self) -> list[str]:
        """The first different reasons for which requests failed."""
        failed = (each.error for each in self.figures.timings if not each.is_complete)
        return [*dict.fromkeys(failed)][:_SHOWN_ERRORS]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """All loads.

    Attributes:
        target: whom.
        data: what was asked.
        runs: each load as often as it was repeated, one after another.
        repetitions: of each load.
        notes: what a reader should know, as prompts that the prefix cache had.
    """

    target: Target
    data: DatasetConfig
    runs: tuple[ServeRun, ...]
    repetitions: int
    notes: tuple[str, ...]

    def as_json(self, run: ServeRun, *, detailed: bool = False) -> dict[str, Any]:
        """One load under the keys of vLLM's result files."""
        rate = run.load.request_rate
        return {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "backend": "openai-chat" if self.target.endpoint == CHAT else "openai",
            "model_id": self.target.model,
            "dataset_name": self.data.name,
            "num_prompts": self.data.num_prompts,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": "inf" if math.isinf(run.load.burstiness) else run.load.burstiness,
            "max_concurrency": run.load.max_concurrency,
            **run.figures.as_json(detailed=detailed),
        }


def find_model(
    address: Address, name: str | None, headers: Mapping[str, str] | None = None
) -> ServedModel:
    """Ask the server for its models.

    Raises:
        EngineError: if it does not answer, or has no such model.
    """
    try:
        response = asyncio.run(
            send(address, "GET", "/v1/models", headers=headers, timeout=_QUICK_SECONDS)
        )
    except HttpError as error:
        raise EngineError(f"{error}: start the server, or correct --base-url.") from error
    try:
        cards = json.loads(response.text)["data"]
        names = [str(card["id"]) for card in cards]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"{address.name}/v1/models answers with status {response.status} and no list of "
            "models: check --base-url and --api-key."
        ) from error
    if not names or (name is not None and name not in names):
        raise EngineError(
            f"{address.name} has no model {name!r}: it serves {', '.join(names) or 'none'}."
        )
    card = cards[names.index(name) if name else 0]
    length = card.get("max_model_len")
    return ServedModel(
        str(card["id"]), str(card.get("root") or ""), length if isinstance(length, int) else None
    )


def bench_serve(
    target: Target,
    data: DatasetConfig,
    loads: Sequence[LoadConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    repetitions: int = 1,
    num_warmups: int = 0,
    reset_prefix_cache: bool = False,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    progress: Progress = no_progress,
) -> ServeReport:
    """Send each load, one after another.

    Args:
        target: the server.
        data: what is asked.
        loads: how it is sent.
        tokenizer: of the model, which cuts prompts to their lengths.
        repetitions: of each load; random data is drawn anew for each.
        num_warmups: requests sent before, which do not count.
        reset_prefix_cache: ask the server (vLLM's route) to forget its prefixes before each load.
        percentiles: of times.
        goodput: goals, as `parse_goodput` gives them.
        progress: told how many requests are answered.

    Raises:
        ConfigError: for settings that make no load.
        RequestError: for data that cannot be read.
        EngineError: if no request is answered, or prefixes cannot be forgotten.
    """
    data.check()
    for load in loads:
        load.check()
    vocabulary = Vocabulary.of(tokenizer)
    runs: list[ServeRun] = []
    for load in loads:
        for _ in range(repetitions):
            seed = data.seed + len(runs)
            requests = _as_texts(
                make_requests(replace(data, seed=seed), vocabulary), seed, vocabulary
            )
            if num_warmups and not runs:
                warm_ups = [requests[0]] * num_warmups
                asyncio.run(_send_all(target, warm_ups, [0.0] * num_warmups, load, no_progress, ""))
            if reset_prefix_cache:
                _reset(target)
            stage = f"load {len(runs) + 1} of {len(loads) * repetitions}"
            work = _send_all(target, requests, load.arrivals(requests, seed), load, progress, stage)
            timings, seconds = _run_undisturbed(work)
            figures = summarize(timings, seconds, percentiles=percentiles, goodput=goodput)
            runs.append(ServeRun(load, figures))
            if not figures.completed:
                raise EngineError(f"No request was answered: {runs[-1].errors[0]}")
    return ServeReport(
        target=target,
        data=data,
        runs=tuple(runs),
        repetitions=repetitions,
        notes=tuple(_notes(runs, data)),
    )


def _as_texts(
    requests: Sequence[BenchRequest], seed: int, vocabulary: Vocabulary
) -> list[BenchRequest]:
    rng = random.Random(f"text/{seed}")
    return [vocabulary.as_text(request, rng) for request in requests]


def _run_undisturbed(
    work: Coroutine[Any, Any, tuple[list[RequestTiming], float]],
) -> tuple[list[RequestTiming], float]:
    """Run without pauses of the garbage collector, which would be taken for the server's."""
    gc.collect()
    gc.disable()
    try:
        return asyncio.run(work)
    finally:
        gc.enable()


async def _send_all(
    target: Target,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    load: LoadConfig,
    progress: Progress,
    stage: str,
) -> tuple[list[RequestTiming], float]:
    """Timings of all requests, and the seconds that it took."""
    slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    payloads = [target.payload(request) for request in requests]
    done = 0

    async def work(payload: bytes) -> Response | str:
        nonlocal done
        async with slots or contextlib.nullcontext():
            try:
                headers = target.headers
                return await send(
                    target.address, "POST", target.endpoint, payload, headers, target.timeout
                )
            except HttpError as error:
                return str(error)
            finally:
                done += 1
                progress(stage, done, len(requests))

    progress(stage, 0, len(requests))
    begin = time.perf_counter()
    tasks = []
    for payload, arrival in zip(payloads, arrivals, strict=True):
        wait = begin + arrival - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(work(payload)))
    answers = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begin
    return [
        RequestTiming(begin, prompt_tokens=len(request.token_ids), error=answer)
        if isinstance(answer, str)
        else read_timing(answer, len(request.token_ids))
        for request, answer in zip(requests, answers, strict=True)
    ], seconds


def _reset(target: Target) -> None:
    try:
        response = asyncio.run(
            send(
                target.address,
                "POST",
                "/reset_prefix_cache",
                headers=target.headers,
                timeout=_QUICK_SECONDS,
            )
        )
    except HttpError as error:
        raise EngineError(f"The prefix cache cannot be reset: {error}.") from error
    if response.status != 200:
        raise EngineError(
            f"{target.address.name}/reset_prefix_cache answers with status {response.status}: "
            "leave out --reset-prefix-cache, or restart the server between runs."
        )


def _notes(runs: Sequence[ServeRun], data: DatasetConfig) -> list[str]:
    """What makes figures better or worse than they look."""
    notes = []
    factor = length_factor(data)
    if factor < 1:
        notes.append(
            f"All lengths of the trace were multiplied by {factor:.3g}, so that its longest "
            f"request fits {data.max_request_len:,} tokens."
        )
    cached = [run.figures.total_cached_tokens for run in runs]
    read = sum(run.figures.total_input_tokens for run in runs)
    if any(cached):
        share = sum(tokens or 0 for tokens in cached) / read
        notes.append(
            f"{share:.0%} of the prompts' tokens came from the server's prefix cache, which makes "
            "first tokens faster: prompts share beginnings, or were sent before. With "
            "--reset-prefix-cache the server forgets them first; another --seed draws others."
        )
    elif None in cached and len(runs) > 1 and data.name != "random":
        notes.append(
            "The server does not tell what its prefix cache gave; all runs sent the same prompts, "
            "so later ones may be faster: --reset-prefix-cache makes it forget them."
        )
    for run in runs:
        notes += (f"Failed: {error}" for error in run.errors)
    return [*dict.fromkeys(notes)]
