"""What is asked: prompts, how long their answers shall be, and when they come."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tightkv.benchmark.traces import (
    TracedRequest,
    fitting_factor,
    read_azure,
    read_mooncake,
    scaled,
)
from tightkv.errors import ConfigError, RequestError

__all__ = [
    "DATASETS",
    "TRACES",
    "BenchRequest",
    "DatasetConfig",
    "Vocabulary",
    "length_factor",
    "make_requests",
]

TRACES = ("azure", "mooncake")
"""Data with times of arrival."""

DATASETS = ("random", "sharegpt", "custom", *TRACES)
"""What requests can be made from."""

_DEFAULT_INPUT_LEN, _DEFAULT_OUTPUT_LEN = 1024, 128
_CUSTOM_OUTPUT_LEN = 256
_TRIES = 10
_WORDS = " the of and to in is that for"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and what is asked for it.

    Attributes:
        token_ids: of the prompt.
        output_len: tokens of the answer.
        text: the prompt as text.
        arrival: seconds after the first request, where the data tells.
    """

    token_ids: tuple[int, ...]
    output_len: int
    text: str = ""
    arrival: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Which data, and how much of it; spelled as in `vllm bench`.

    Attributes:
        name: one of `DATASETS`.
        path: of the file; none for random.
        num_prompts: requests.
        input_len: tokens of a random prompt; default: 1024.
        output_len: tokens of each answer; default: 128 (random), 256 (custom), or as the data says.
        range_ratio: random lengths differ by up to this share, up and down.
        prefix_len: tokens that all random prompts have in common, besides `input_len`.
        max_request_len: tokens that a prompt and its answer may have: traces are scaled by one
            factor, of other data longer ones are left out.
        seed: of what is drawn.
    """

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    max_request_len: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse what contradicts itself, before anything is loaded.

        Raises:
            ConfigError: names the flag.
        """
        if self.name not in DATASETS:
            raise ConfigError(
                f"--dataset-name is {self.name!r}: choose one of {', '.join(DATASETS)}."
            )
        if (self.path is None) != (self.name == "random"):
            raise ConfigError(
                "--dataset-path goes with --dataset-name "
                f"{', '.join(DATASETS[1:])}, and is needed there: "
                f"{'leave it out' if self.path else 'name the file'}."
            )
        least = (
            ("--num-prompts", self.num_prompts, 1),
            ("--input-len", self.input_len, 1),
            ("--output-len", self.output_len, 1),
            ("--random-prefix-len", self.prefix_len, 0),
            ("--max-model-len", self.max_request_len, 1),
        )
        for flag, value, limit in least:
            if value is not None and value < limit:
                raise ConfigError(f"{flag} is {value}: give a number from {limit} on.")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"--random-range-ratio is {self.range_ratio:g}: give a number from 0 to below 1."
            )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, and the tokens that random prompts are made of.

    Attributes:
        tokenizer: the model's.
        token_ids: all but special ones.
    """

    tokenizer: PreTrainedTokenizerBase
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> Vocabulary:
        """Of a model whose logits have `vocab_size` values."""
        size = min(len(tokenizer), vocab_size or len(tokenizer))
        special = set(tokenizer.all_special_ids)
        return cls(tokenizer, tuple(token for token in range(size) if token not in special))

    def draw(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(self.token_ids, k=count)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def as_text(self, request: BenchRequest, rng: random.Random) -> BenchRequest:
        """The request with a text whose tokens are as many.

        Random tokens, once they are text, are rarely cut into the same tokens again: those that
        come out are taken instead, cut and filled up with plain words, until they stay. Where they
        do not, the prompt is a little longer or shorter.
        """
        if request.text:
            return request
        length, ids = len(request.token_ids), [*request.token_ids]
        words = self.encode(_WORDS)
        for tried in range(_TRIES):
            text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
            ids = self.encode(text)
            if len(ids) == length:
                break
            # One more is cut each time: a cut within a character leaves a piece that grows again.
            kept = ids[: max(0, length - tried)]
            ids = kept + rng.choices(words, k=length - len(kept))
        return replace(request, text=text, token_ids=tuple(self.encode(text)))


def make_requests(config: DatasetConfig, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The requests; the same for the same seed.

    Raises:
        ConfigError: as `DatasetConfig.check` says.
        RequestError: for a file that cannot be read, or has too few requests.
    """
    config.check()
    makers: dict[str, Callable[[DatasetConfig, Vocabulary], list[BenchRequest]]] = {
        "random": _random,
        "sharegpt": _conversations,
        "custom": _custom,
        "azure": _traced,
        "mooncake": _traced,
    }
    return makers[config.name](config, vocabulary)


def _random(config: DatasetConfig, vocabulary: Vocabulary) -> list[BenchRequest]:
    rng = random.Random(f"random/{config.seed}")
    prefix = vocabulary.draw(rng, config.prefix_len)

    def length(middle: int) -> int:
        low = math.floor(middle * (1 - config.range_ratio))
        return max(1, rng.randint(low, math.ceil(middle * (1 + config.range_ratio))))

    return [
        BenchRequest(
            (*prefix, *vocabulary.draw(rng, length(config.input_len or _DEFAULT_INPUT_LEN))),
            length(config.output_len or _DEFAULT_OUTPUT_LEN),
        )
        for _ in range(config.num_prompts)
    ]


def length_factor(config: DatasetConfig) -> float:
    """What a trace's lengths are multiplied by; 1 for other data."""
    if config.name not in TRACES or config.max_request_len is None:
        return 1.0
    lengths = (each.prompt + each.answer for each in _trace(config))
    return fitting_factor(lengths, config.max_request_len)


def _trace(config: DatasetConfig) -> list[TracedRequest]:
    assert config.path is not None
    read = {"azure": read_azure, "mooncake": read_mooncake}[config.name]
    return read(config.path, config.num_prompts)


def _traced(config: DatasetConfig, vocabulary: Vocabulary) -> list[BenchRequest]:
    """Random tokens of the trace's lengths; blocks of the same id are the same tokens."""
    trace = _trace(config)
    if config.max_request_len is not None:
        trace = scaled(trace, config.max_request_len)
    rng = random.Random(f"trace/{config.seed}")
    requests = []
    for each in trace:
        ids: list[int] = []
        for block in each.blocks:
            of_block = random.Random(f"block/{config.seed}/{block}")
            ids += vocabulary.draw(of_block, each.block_size)
        ids = ids[: each.prompt]
        ids += vocabulary.draw(rng, each.prompt - len(ids))
        requests.append(
            BenchRequest(tuple(ids), config.output_len or each.answer, arrival=each.arrival)
        )
    return requests


def _conversations(config: DatasetConfig, vocabulary: Vocabulary) -> list[BenchRequest]:
    """First turns of conversations; the reply says how long the answer shall be."""
    found = []
    for entry, where in _entries(config):
        turns = _turns(entry, where)
        if len(turns) >= 2:
            found.append((turns[0], len(vocabulary.encode(turns[1]))))
    return _chosen(config, vocabulary, found)


def _custom(config: DatasetConfig, vocabulary: Vocabulary) -> list[BenchRequest]:
    """Prompts of one's own; "output_tokens" may say how long the answer shall be."""
    found = []
    for entry, where in _entries(config):
        prompt = entry.get("prompt") if isinstance(entry, Mapping) else entry
        if not isinstance(prompt, str) or not prompt:
            raise RequestError(f'{where} has no "prompt" with a text: add it.')
        length = entry.get("output_tokens") if isinstance(entry, Mapping) else None
        if length is not None and (not isinstance(length, int) or length < 1):
            raise RequestError(f'{where} has "output_tokens" {length!r}: give a number from 1 on.')
        found.append((prompt, length or _CUSTOM_OUTPUT_LEN))
    return _chosen(config, vocabulary, found)


def _chosen(
    config: DatasetConfig, vocabulary: Vocabulary, found: Sequence[tuple[str, int]]
) -> list[BenchRequest]:
    """`num_prompts` of what was found, in random order, without those that are too long."""
    requests = [
        BenchRequest(tuple(vocabulary.encode(prompt)), config.output_len or max(1, length), prompt)
        for prompt, length in found
    ]
    limit = config.max_request_len
    fitting = [each for each in requests if limit is None or each.num_tokens <= limit]
    if len(fitting) < config.num_prompts:
        raise RequestError(
            f"{config.path} has {len(fitting)} requests"
            f"{'' if limit is None else f' of at most {limit} tokens'}, and {config.num_prompts} "
            "were asked for: lower --num-prompts."
        )
    return random.Random(f"choice/{config.seed}").sample(fitting, config.num_prompts)


def _entries(config: DatasetConfig) -> Iterator[tuple[Any, str]]:
    """Entries of a JSON array or of JSON lines, and where they stand."""
    assert config.path is not None
    try:
        text = config.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{config.path} cannot be read ({error}): check --dataset-path."
        ) from error
    if text.lstrip().startswith("["):
        for number, entry in enumerate(_parsed(text, str(config.path)), start=1):
            yield entry, f"{config.path}, entry {number},"
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            where = f"{config.path}, line {number},"
            yield _parsed(line, where), where


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON ({error.msg}): correct it.") from error


def _turns(entry: Any, where: str) -> list[str]:
    """Texts of a conversation: ShareGPT's "conversations", or OpenAI's "messages"."""
    known = entry if isinstance(entry, Mapping) else {}
    turns = known.get("conversations") or known.get("messages")
    if turns is None and "conversations" not in known and "messages" not in known:
        raise RequestError(f'{where} has neither "conversations" nor "messages": add one.')
    texts = []
    for turn in turns or ():
        spoken = turn if isinstance(turn, Mapping) else {}
        if spoken.get("role") == "system" or spoken.get("from") == "system":
            continue
        text = spoken.get("value", spoken.get("content"))
        if not isinstance(text, str):
            raise RequestError(f"{where} has a turn without a text: correct it.")
        texts.append(text)
    return texts
