"""An arm, asked in lm-evaluation-harness's way."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tightkv.calibration.progress import Progress
from tightkv.engine.outputs import RequestOutput
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import PromptTooLongError, RequestError
from tightkv.evaluation.arms import Arm
from tightkv.evaluation.tasks.item import Answers, Request, answer_all, num_tokens
from tightkv.evaluation.tasks.likelihood import force, is_greedy, log_likelihood, split_tokens

__all__ = ["harness_model"]

_MAX_TOKENS = 256  # lm-evaluation-harness's own, where the task says nothing
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1}


def harness_model(arm: Arm, task: str, stage: str, progress: Progress, stderr: Any) -> Any:
    """An `lm_eval.api.model.LM` whose answers are the arm's.

    Args:
        arm: which answers.
        task: for messages.
        stage: told to `progress`.
        progress: called after each context.
        stderr: where bars are drawn while the arm works.
    """
    from lm_eval.api.model import LM

    asked = _Asked(arm, task, stage, progress)

    class ArmModel(LM):  # type: ignore[misc]
        """Requests of lm-eval, each with `args`."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            with contextlib.redirect_stderr(stderr):
                return asked.log_likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            with contextlib.redirect_stderr(stderr):
                return asked.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            with contextlib.redirect_stderr(stderr):
                return asked.texts([request.args for request in requests])

    return ArmModel()


class _Asked:
    """The three kinds of question."""

    def __init__(self, arm: Arm, task: str, stage: str, progress: Progress) -> None:
        self._arm = arm
        self._task = task
        self._stage = stage
        self._progress = progress
        self._limit = arm.engine.plan.max_model_len
        tokenizer = arm.engine.model.tokenizer
        first = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        self._first = next(token for token in first if token is not None)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of a continuation after its context, and whether it is the greedy one."""
        grouped: dict[str, list[Request]] = {}
        places: list[tuple[str, int]] = []
        for context, continuation in pairs:
            group = grouped.setdefault(context, [])
            places.append((context, len(group)))
            prompt, tokens = self._split(context, continuation)
            # One list for all: tasks have many long contexts.
            group.append(force(group[0][0] if group else prompt, tokens))
        answers = self._answers(grouped)
        found = [answers[name][index] for name, index in places]
        return [(log_likelihood(answer), is_greedy(answer)) for answer in found]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihoods of whole texts, in windows as lm-eval cuts them; read, not forced."""
        windows = [(index, *pair) for index, text in enumerate(texts) for pair in self._cut(text)]
        prompts = [[*context, *tokens] for _, context, tokens in windows]
        sums = [0.0] * len(texts)
        num_done = 0

        def on_finished(at: int, output: RequestOutput) -> None:
            nonlocal num_done
            index, context, tokens = windows[at]
            assert output.prompt_logprobs is not None
            found = output.prompt_logprobs[len(context) :]
            sums[index] += math.fsum(
                top[token].logprob for top, token in zip(found, tokens, strict=True) if top
            )
            num_done += 1
            self._progress(self._stage, num_done, len(windows))

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._arm.generate(prompts, [params] * len(prompts), on_finished)
        return sums

    def texts(self, pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What follows each context."""
        requests = {
            str(index): [(self._arm.engine.tokenize(context), self._params(index, arguments))]
            for index, (context, arguments) in enumerate(pairs)
        }
        answers = self._answers(requests)
        return [answers[name][0].text for name in requests]

    def _answers(self, requests: Mapping[str, Sequence[Request]]) -> dict[str, Answers]:
        for request in (request for of_item in requests.values() for request in of_item):
            needed = num_tokens(request)
            if needed > self._limit:
                raise PromptTooLongError(
                    f"{self._task} needs {needed:,} tokens for an item and its answer, and "
                    f"{self._limit:,} is the most here: raise --max-model-len, or take another "
                    "task."
                )
        answers: dict[str, Answers] = {}

        def on_answered(name: str, of_item: Answers) -> None:
            answers[name] = of_item
            self._progress(self._stage, len(answers), len(requests))

        answer_all(requests, self._arm, on_answered)
        return answers

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        tokenize = self._arm.engine.tokenize
        if context.strip():
            return split_tokens(tokenize, context, continuation)
        return [self._first], tokenize(context + continuation, add_special_tokens=False)

    def _cut(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Windows of a text: tokens that are known, and tokens to be predicted."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        tokens = self._arm.engine.tokenize(text, add_special_tokens=False)
        # A prompt has the token before the window, and is answered with one token.
        windows = get_rolling_token_windows(tokens, self._first, self._limit - 2, 1)
        return [make_disjoint_window(window) for window in windows]

    def _params(self, index: int, arguments: Mapping[str, Any]) -> SamplingParams:
        """From the arguments of transformers' `generate`, as tasks give them.

        Raises:
            RequestError: for one that is not served.
        """
        given = dict(arguments)
        until = given.pop("until", None) or []
        lengths = [given.pop(name, None) for name in _LENGTHS]
        is_sampled = given.pop("do_sample", float(given.get("temperature") or 0) > 0)
        sampling = {name: given.pop(name) for name in _SAMPLING if name in given}
        for name, value in given.items():
            if _WITHOUT_EFFECT.get(name) != value:
                raise RequestError(
                    f"{self._task} asks for {name}={value!r}, which is not served here: take "
                    "another task."
                )
        return SamplingParams(
            **(sampling if is_sampled else {"temperature": 0}),
            seed=index,
            max_tokens=int(next(filter(None, lengths), _MAX_TOKENS)),
            stop=[stop for stop in ([until] if isinstance(until, str) else until) if stop],
        )
