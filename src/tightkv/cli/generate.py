"""`tightkv generate MODEL`: answers to prompts from the command line or a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tightkv.cli.options import add_flags, given_options
from tightkv.engine.outputs import RequestOutput
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.files import atomic_file, check_target
from tightkv.llm import LLM

__all__ = ["add_parser"]

_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "n": (int, "answers per prompt"),
    "max_tokens": (int, "most tokens of an answer"),
    "min_tokens": (int, "least tokens of an answer"),
    "temperature": (float, "0 takes the most probable token"),
    "top_p": (float, "sample from the most probable tokens with this share of the probability"),
    "top_k": (int, "sample from this many most probable tokens"),
    "min_p": (float, "sample from tokens at least this probable, relative to the most probable"),
    "repetition_penalty": (float, "above 1 makes tokens of prompt and answer less likely"),
    "presence_penalty": (float, "above 0 makes tokens of the answer less likely"),
    "frequency_penalty": (float, "the same, for each time a token was used"),
}


def add_parser(commands: Any) -> None:
    """Add the command to the parser's sub-commands."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts, one by one or from a file",
        description="Answers prompts. Texts go to standard output, or with --output to a file.",
    )
    add_flags(parser)
    prompts = parser.add_argument_group("prompts and answers")
    prompts.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    prompts.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help='JSON lines: a text, {"prompt": text} or {"messages": [...]}',
    )
    prompts.add_argument(
        "--chat", action="store_true", help="send each prompt as a user's message to a chat model"
    )
    prompts.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the answers as JSON lines"
    )
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING_FLAGS.items():
        sampling.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar="N" if kind is int else "X",
            help=text,
        )
    sampling.add_argument("--stop", action="append", help="a text that ends an answer")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer; 1 if a request failed while it ran."""
    given = vars(arguments)
    sampling = SamplingParams(
        **{name: given[name] for name in _SAMPLING_FLAGS if name in given},
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )
    prompts = _collect(arguments)
    if arguments.output is not None:
        check_target(arguments.output)
    llm = LLM(**given_options(arguments))
    outputs = _answer(llm, prompts, sampling)
    if arguments.output is None:
        _print(outputs)
    else:
        with atomic_file(arguments.output) as file:
            for output in outputs:
                file.write(json.dumps(_record(output), ensure_ascii=False).encode() + b"\n")
    failed = [output for output in outputs if output.error]
    for output in failed:
        print(f"error: request {output.request_id}: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def _collect(arguments: argparse.Namespace) -> list[Any]:
    """Texts and conversations, in the order given."""
    prompts: list[Any] = list(arguments.prompt)
    if arguments.prompts_file is not None:
        prompts += _read(arguments.prompts_file)
    if not prompts:
        raise RequestError("There is no prompt: give --prompt or --prompts-file.")
    if arguments.chat:
        return [
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
    return prompts


def _read(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path} cannot be read ({error}): give a file of JSON lines."
        ) from error
    return [
        _parse(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse(line: str, where: str) -> Any:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON ({error.msg}): correct it.") from error
    if isinstance(entry, Mapping) and isinstance(entry.get("messages"), list):
        return entry["messages"]
    prompt = entry.get("prompt") if isinstance(entry, Mapping) else entry
    if not isinstance(prompt, str):
        raise RequestError(
            f'{where} has neither a text, nor "prompt" with a text, nor "messages": correct it.'
        )
    return prompt


def _answer(llm: LLM, prompts: list[Any], sampling: SamplingParams) -> list[RequestOutput]:
    texts = [prompt if isinstance(prompt, str) else llm.render_chat(prompt) for prompt in prompts]
    ids = [
        llm.engine.tokenize(text, add_special_tokens=isinstance(prompt, str))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("answering", total=len(ids))
        outputs = llm.generate(ids, sampling, lambda _: progress.advance(task))
    return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]


def _print(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            print(completion.text)


def _record(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for completion in output.outputs
        ],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }
