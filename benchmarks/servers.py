"""TightKV's server against those of vLLM and llama-cpp-python on this CPU, all in one run.

    LLAMA_CPP_PYTHON=…/bin/python VLLM_PYTHON=…/bin/python make bench-server ARGS="--trace FILE"

Each server answers the same streaming requests in the same order, from some clients at once, each
of which waits for its answer before it sends the next. Prompts are text, since llama-cpp-python
takes no token ids; answers are greedy and as long as asked. Then one client asks alone. Lengths are
those of a trace in Azure's form, or drawn like it, all scaled by one factor. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.serving.driver import Result
from benchmarks.serving.engines import Arm, EngineFailure, Outcome, take_turns
from benchmarks.serving.machine import describe_machine
from benchmarks.serving.peers import (
    Prepared,
    add_engine_options,
    common_environment,
    prepare,
    vllm_environment,
)
from benchmarks.serving.report import (
    Bar,
    Row,
    as_json,
    at_least,
    at_most,
    compare,
    table,
    write_atomically,
)
from benchmarks.serving.request_lengths import (
    Lengths,
    cut_prompts,
    draw_lengths,
    read_trace,
    scaled,
)
from benchmarks.serving.server_process import MODEL_NAME, Server

SERVERS = ("tightkv", "vllm", "llama_cpp")
WARM_UP_TOKENS = 8
# As many of the requests come once more, from one client: llama-cpp-python's server answers one
# request at a time, so that only then the time per token is of the same work.
ALONE_REQUESTS = 12
# llama.cpp ends an answer at any of these, if the model has them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>")
# llama.cpp takes context lengths in such pieces.
CONTEXT_STEP = 256
# Tokenizers may differ a little: llama.cpp's reads "\n\n1" as two tokens, that of a folder made
# from a GGUF file as three.
EQUAL_WORK = 0.005


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.servers",
        description="TightKV's server against those of other engines on this CPU.",
    )
    add_engine_options(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    parser.add_argument("--only", type=_servers, default=list(SERVERS), help=",".join(SERVERS))
    parser.add_argument("--rounds", type=int, default=1, help="turns of each server")
    parser.add_argument("--requests", type=int, help="default 200; 12 with --quick")
    parser.add_argument("--clients", type=int, help="at once; default 16; 4 with --quick")
    parser.add_argument("--trace", type=Path, help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--seed", type=int, default=0, help="of lengths drawn without a trace")
    parser.add_argument(
        "--max-model-len", type=int, help="of the longest request; default 2048; 256 with --quick"
    )
    parser.add_argument("--kv-cache-bytes", type=int, default=2**30, help="where it can be told")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of TightKV's cache")
    for name in SERVERS:
        flag = f"--{name.replace('_', '-')}-args"
        parser.add_argument(flag, type=shlex.split, default=[], help="further flags of this server")
    parser.add_argument("--output", type=Path, help="file that also gets the JSON object")
    options = parser.parse_args()
    sizes = {"requests": (200, 12), "clients": (16, 4), "max_model_len": (2048, 256)}
    for name, (full, quick) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def _servers(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SERVERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown server {unknown[0]!r}; choose of {','.join(SERVERS)}"
        )
    return names


def make_lengths(options: argparse.Namespace) -> list[Lengths]:
    """Lengths of all requests, in their order.

    Raises:
        ValueError, OSError: for a trace that cannot be used.
    """
    if options.trace:
        lengths = read_trace(options.trace, options.requests)
    else:
        lengths = draw_lengths(options.requests, options.seed)
    return scaled(lengths, options.max_model_len)


def make_requests(
    lengths: Sequence[Lengths], num_warm_up: int, token_ids: list[int], tokenizer: Tokenizer
) -> dict[str, list[dict[str, Any]]]:
    """Bodies of the requests that count, and of those before, which are as long but short-spoken.

    The first of those that count come again at the end, from one client.

    Raises:
        ValueError: if the text is too short for the prompts.
    """
    warm_up = [Lengths(each.prompt, WARM_UP_TOKENS) for each in lengths[:num_warm_up]]
    every = [*lengths, *warm_up]
    prompts = cut_prompts(
        token_ids,
        [each.prompt for each in every],
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
    )
    bodies = [
        {"prompt": prompt, "max_tokens": each.answer}
        for prompt, each in zip(prompts, every, strict=True)
    ]
    return {
        "requests": bodies[: len(lengths)],
        "warm_up": bodies[len(lengths) :],
        "alone": bodies[: min(ALONE_REQUESTS, len(lengths))],
    }


def make_servers(
    options: argparse.Namespace, prepared: Prepared, tokenizer: Tokenizer
) -> dict[str, Server]:
    """The servers, each with the settings that serve it best.

    No prefix cache: no two prompts begin alike, and what a round has filled shall not help the
    next.
    """
    limit, threads = str(options.max_model_len), str(options.threads)
    folder, environment = str(prepared.folder), common_environment(options)
    common = [
        *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--max-model-len", limit),
        *("--kv-cache-memory-bytes", str(options.kv_cache_bytes), "--no-enable-prefix-caching"),
    ]
    body = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    ends = [tokenizer.token_to_id(text) for text in END_TOKENS]
    return {
        "tightkv": Server(
            "TightKV",
            "tightkv",
            flags=(
                *("serve", folder, *common, "--kv-cache-dtype", options.kv_cache_dtype),
                *options.tightkv_args,
            ),
            environment=environment,
            body=body,
        ),
        "vllm": Server(
            "vLLM",
            "vllm.entrypoints.openai.api_server",
            options.vllm_python,
            "VLLM_PYTHON",
            flags=(
                *("--model", folder, *common, "--disable-uvicorn-access-log"),
                *options.vllm_args,
            ),
            environment=vllm_environment(options),
            body=body,
        ),
        "llama_cpp": Server(
            "llama-cpp-python",
            "llama_cpp.server",
            options.llama_cpp_python,
            "LLAMA_CPP_PYTHON",
            flags=(
                *("--model", str(prepared.gguf), "--model_alias", MODEL_NAME),
                # It refuses an answer that would fill its context to the last token.
                *("--n_ctx", str(options.max_model_len // CONTEXT_STEP * CONTEXT_STEP + 256)),
                *("--n_threads", threads, "--n_threads_batch", threads, "--flash_attn", "true"),
                # By default it computes logits of all prompt tokens, and breaks an answer off when
                # the next request comes.
                *("--logits_all", "false", "--interrupt_requests", "false", "--verbose", "false"),
                *options.llama_cpp_args,
            ),
            environment=environment,
            # It knows no ignore_eos.
            body={"logit_bias": {str(token): -100 for token in ends if token is not None}},
        ),
    }


def make_rows(outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Ours against each peer, figure by figure."""
    ours, *peers = outcomes.values()
    figures: list[tuple[str, str, Callable[[Result], float], Bar | None]] = [
        ("requests", "/s", itemgetter("requests_per_second"), at_least(1.0)),
        ("output tokens", "/s", itemgetter("output_tokens_per_second"), at_least(1.0)),
        ("time to first token, p50", "s", itemgetter("ttft_p50"), at_most(1.0)),
        ("time to first token, p99", "s", itemgetter("ttft_p99"), at_most(1.0)),
        ("time per further token, p50", "ms", _milliseconds("tpot_p50"), at_most(1.0)),
        ("whole request, p50", "s", itemgetter("latency_p50"), None),
        ("whole request per token, p50", "ms", _milliseconds("latency_per_token_p50"), None),
        ("1 client: time to first token, p50", "s", _alone(itemgetter("ttft_p50")), at_most(1.0)),
        (
            "1 client: time per further token, p50",
            "ms",
            _alone(_milliseconds("tpot_p50")),
            at_most(1.0),
        ),
    ]
    if not peers:
        return [Row(work, unit, ours.median(figure)) for work, unit, figure, _ in figures]
    return [
        compare(work, unit, figure, ours, peer, bar)
        for peer in peers
        for work, unit, figure, bar in figures
    ]


def _milliseconds(name: str) -> Callable[[Result], float]:
    return lambda result: 1e3 * result[name]


def _alone(figure: Callable[[Result], float]) -> Callable[[Result], float]:
    return lambda result: figure(result["alone"])


def make_notes(
    outcomes: Mapping[str, Outcome], lengths: Sequence[Lengths], threads: int
) -> list[str]:
    """What makes figures doubtful: requests that failed, other work than asked, a busy machine."""
    notes = []
    for name, outcome in outcomes.items():
        for result in outcome.results:
            notes += _notes_on(name, result, lengths)
            notes += _notes_on(f"{name}, 1 client", result["alone"], lengths[:ALONE_REQUESTS])
            # Besides the engine's threads there is the client's, and perhaps the server's own.
            if result["load_average"] > threads + 2:
                notes.append(
                    f"DOUBTFUL {name}: a load of {result['load_average']}: something else ran"
                )
    return notes


def _notes_on(name: str, result: Result, lengths: Sequence[Lengths]) -> list[str]:
    asked = (sum(each.prompt for each in lengths), sum(each.answer for each in lengths))
    done = (result["prompt_tokens"], result["new_tokens"])
    notes = []
    if result["failed"]:
        notes.append(f"FAILED {name}: {result['failed']} requests: {result['errors'][0]}")
    if not all(map(_is_equal_work, done, asked)):
        notes.append(
            f"UNEQUAL {name}: {done[0]} tokens read and {done[1]} made; "
            f"{asked[0]} and {asked[1]} were asked for"
        )
    return notes


def _is_equal_work(done: int | None, asked: int) -> bool:
    return done is not None and abs(done - asked) <= EQUAL_WORK * asked


def summary(
    options: argparse.Namespace,
    lengths: Sequence[Lengths],
    outcomes: Mapping[str, Outcome],
    rows: Sequence[Row],
    notes: Sequence[str],
) -> dict[str, Any]:
    servers = {name: outcome.arm.engine for name, outcome in outcomes.items()}
    return {
        "benchmark": "servers",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {
            "python": sys.version.split()[0],
            **{name: each.results[0]["version"] for name, each in outcomes.items() if each.results},
        },
        "threads": options.threads,
        "rounds": options.rounds,
        "quick": options.quick,
        "clients": options.clients,
        "requests": len(lengths),
        "lengths_from": options.trace.name if options.trace else f"log-normal, {options.seed}",
        "max_model_len": options.max_model_len,
        "kv_cache_bytes": options.kv_cache_bytes,
        "prompt_tokens": sum(each.prompt for each in lengths),
        "new_tokens": sum(each.answer for each in lengths),
        "settings": {
            # Where files lie on this machine is nobody's business.
            name: {
                "flags": [
                    Path(flag).name if Path(flag).is_absolute() else flag for flag in server.flags
                ],
                "body": server.body,
            }
            for name, server in servers.items()
            if isinstance(server, Server)
        },
        "rows": [as_json(row) for row in rows],
        "notes": notes,
        "figures": {name: each.failure or each.results for name, each in outcomes.items()},
    }


def measure(options: argparse.Namespace, lengths: Sequence[Lengths]) -> dict[str, Outcome]:
    """Let the servers take turns; what ours has found comes first.

    Raises:
        EngineFailure: if the model cannot be prepared.
        ValueError: if the text is too short for the prompts.
    """
    prepared = prepare(options)
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    requests = make_requests(lengths, options.clients, prepared.token_ids, tokenizer)
    servers = make_servers(options, prepared, tokenizer)
    arms = [Arm(servers[name].name, servers[name]) for name in SERVERS if name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.json"
        path.write_text(json.dumps(requests), encoding="utf-8")
        found = take_turns(
            "servers", "load", arms, options.rounds, requests=path, clients=options.clients
        )
    ours = servers["tightkv"]
    return {ours.name: Outcome(Arm(ours.name, ours), failure="left out"), **found}


def main() -> int:
    options = parse_options()
    # As an exception, so that the server at work is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        lengths = make_lengths(options)
        outcomes = measure(options, lengths)
    except (EngineFailure, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows, notes = make_rows(outcomes), make_notes(outcomes, lengths, options.threads)
    title = (
        f"{len(lengths)} requests, {options.clients} clients, {options.threads} threads, float32"
    )
    console = Console(width=120)
    console.print(table(rows, f"{title}; sizes too small for the bars" if options.quick else title))
    for note in notes:
        console.print(note, markup=False, highlight=False)
    line = json.dumps(summary(options, lengths, outcomes, rows, notes), ensure_ascii=False)
    if options.output:
        write_atomically(options.output, line + "\n")
    print(line)
    ours = next(iter(outcomes.values()))
    has_failed = ours.failure or any(
        each["failed"] for result in ours.results for each in (result, result["alone"])
    )
    return 1 if has_failed and "tightkv" in options.only else 0


if __name__ == "__main__":
    sys.exit(main())
