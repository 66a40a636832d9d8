"""How probable a text is after another, by forced tokens: through the decode path that serves."""

from __future__ import annotations

from collections.abc import Sequence

from tightkv.engine.outputs import CompletionOutput
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.evaluation.tasks.item import Request
from tightkv.evaluation.tasks.task import Tokenize

__all__ = ["force", "is_greedy", "log_likelihood", "split_tokens"]


def split_tokens(
    tokenize: Tokenize, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Tokens of a context, and of what follows it, as lm-evaluation-harness splits them.

    Spaces at the end of the context belong to the continuation, whose tokens begin with them.

    Raises:
        RequestError: if nothing is left to be forced.
    """
    stripped = context.rstrip()
    whole = tokenize(context + continuation)
    before = tokenize(stripped)
    # Where the border is inside a token, the continuation stands by itself.
    after = whole[len(before) :] or tokenize(continuation, add_special_tokens=False)
    if not after:
        raise RequestError(f"The continuation {continuation!r} has no tokens: give a text.")
    return before, after


def force(prompt: Sequence[int], tokens: list[int]) -> Request:
    """Let `tokens` follow `prompt`."""
    return prompt, SamplingParams(
        temperature=0, forced_token_ids=tokens, max_tokens=None, detokenize=False, logprobs=0
    )


def log_likelihood(answer: CompletionOutput) -> float:
    """Sum over the forced tokens, in nats."""
    assert answer.cumulative_logprob is not None
    return answer.cumulative_logprob


def is_greedy(answer: CompletionOutput) -> bool:
    """Whether each forced token was the most probable one."""
    assert answer.logprobs is not None
    return all(next(iter(top.values())).rank == 1 for top in answer.logprobs)
