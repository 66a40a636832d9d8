"""How long prompts and answers are: those of a trace, or drawn like them; and prompts so long."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightkv.benchmark.traces import fitting_factor, read_azure

__all__ = ["Lengths", "cut_prompts", "draw_lengths", "read_trace", "scaled"]

# Logarithms of Azure's conversation trace of 2023-11 (19,366 requests; AzurePublicDataset,
# AzureLLMInferenceTrace_conv.csv): mean, standard deviation; and the 99th percentile of the lengths
# themselves, which nothing drawn exceeds, since the trace has no such tail.
_PROMPTS = (6.633, 0.985, 4142)
_ANSWERS = (5.019, 0.859, 601)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request's prompt and of its answer."""

    prompt: int
    answer: int


def read_trace(path: Path, count: int) -> list[Lengths]:
    """The first requests of a trace in Azure's form: TIMESTAMP,ContextTokens,GeneratedTokens.

    Raises:
        RequestError: if the file is of another form, or has fewer requests.
    """
    return [Lengths(each.prompt, each.answer) for each in read_azure(path, count)]


def draw_lengths(count: int, seed: int) -> list[Lengths]:
    """Log-normal lengths with the parameters of Azure's trace, prompts and answers independent.

    In the trace the logarithms of both are nearly so: their correlation is 0.09.
    """
    rng = random.Random(seed)

    def draw(mean: float, deviation: float, most: int) -> int:
        return min(most, max(1, round(rng.lognormvariate(mean, deviation))))

    return [Lengths(draw(*_PROMPTS), draw(*_ANSWERS)) for _ in range(count)]


def scaled(lengths: Sequence[Lengths], longest: int) -> list[Lengths]:
    """All lengths times one factor, at most 1, so that the longest request fits.

    Args:
        lengths: as in the trace.
        longest: tokens that a prompt and its answer may have together, at least 2.
    """
    factor = fitting_factor((each.prompt + each.answer for each in lengths), longest)
    return [
        Lengths(max(1, math.floor(each.prompt * factor)), max(1, math.floor(each.answer * factor)))
        for each in lengths
    ]


def cut_prompts(
    token_ids: Sequence[int],
    lengths: Sequence[int],
    decode: Callable[[list[int]], str],
    encode: Callable[[str], list[int]],
) -> list[str]:
    """Pieces of a text, one after another, that have exactly these lengths as tokens.

    A piece's own text may be cut into tokens otherwise than within the whole; then a piece that
    begins a token later is tried.

    Args:
        token_ids: of the text; it begins anew where it ends.
        lengths: tokens of each piece.
        decode: text of token ids.
        encode: token ids of a text, without special ones.

    Raises:
        ValueError: if the text is shorter than a piece.
    """
    if len(token_ids) <= max(lengths):
        raise ValueError(f"the text has {len(token_ids)} tokens, and a prompt {max(lengths)}")
    prompts, begin = [], 0
    for length in lengths:
        while True:
            if begin + length > len(token_ids):
                # Not where it began before: no two prompts shall begin alike.
                begin = 1 + begin % 7
            text = decode(list(token_ids[begin : begin + length]))
            if len(encode(text)) == length:
                break
            begin += 1
        prompts.append(text)
        begin += length
    return prompts
