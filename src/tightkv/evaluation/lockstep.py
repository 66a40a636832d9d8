"""All arms read the same tokens in turn, so that whole distributions are compared and none is kept.

After each step of the baseline the arms step until they have the same rows of logits. Arms that
schedule alike take one step each; one that cuts prompts elsewhere may take more, or be ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy
import torch

from tightkv.engine.sampling_params import SamplingParams
from tightkv.engine.sequence import Sequence as EngineSequence
from tightkv.errors import EngineError
from tightkv.evaluation.arms import Arm, Arms
from tightkv.metrics import Divergence

__all__ = ["LockstepResult", "Reading", "forced", "prompted", "read_in_lockstep"]

_ROWS = 32
"""Rows that are compared at once."""

RowKey = tuple[str, int]
"""A request, and the position of the token after which the logits stand."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request whose tokens are known beforehand.

    Attributes:
        request_id: different from those of the other readings.
        token_ids: prompt and forced tokens.
        num_prompt_tokens: how many of them are the prompt.
        params: how the engine is asked.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams

    def follows(self, position: int) -> int | None:
        """The token after a position; None after the last."""
        return self.token_ids[position + 1] if position + 1 < len(self.token_ids) else None


def prompted(request_id: str, token_ids: Sequence[int]) -> Reading:
    """Tokens read as a prompt, in chunks; all but the first are predicted."""
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0, detokenize=False)
    return Reading(request_id, token_ids, len(token_ids), params)


def forced(request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> Reading:
    """Tokens of which those behind a prompt are predicted, one per step."""
    params = SamplingParams(
        forced_token_ids=tuple(token_ids[num_prompt_tokens:]),
        max_tokens=None,
        temperature=0,
        detokenize=False,
    )
    return Reading(request_id, token_ids, num_prompt_tokens, params)


@dataclass(frozen=True, slots=True)
class LockstepResult:
    """All predicted tokens, by reading and position.

    Attributes:
        contexts: number of tokens before each.
        divergences: by arm's name, all but the baseline; tokens in the order of `contexts`.
    """

    contexts: list[int]
    divergences: dict[str, Divergence]


def read_in_lockstep(
    arms: Arms, readings: Sequence[Reading], on_rows: Callable[[int], None]
) -> LockstepResult:
    """Run the readings through all arms and compare their logits row by row.

    Memory: logits of one step of each arm; of one that is ahead, of another step.

    Args:
        arms: idle engines.
        readings: requests.
        on_rows: told how many more tokens have been compared in all arms.

    Raises:
        RequestError: if a reading can never be served.
        EngineError: if one failed in an arm; the arm is named.
    """
    by_id = {reading.request_id: reading for reading in readings}
    keys: list[RowKey] = []
    parts: dict[str, list[Divergence]] = {arm.name: [] for arm in arms.others}
    with ExitStack() as stack:
        base, *others = (_Reader(arm, by_id) for arm in arms)
        for reader in (base, *others):
            stack.callback(reader.end)
            reader.begin()
        while base.has_work:
            base.step()
            for reader in others:
                reader.catch_up(base.rows)
            rows = list(base.rows)
            for of_arms in _compare(base, others, by_id):
                for reader, divergence in zip(others, of_arms, strict=True):
                    parts[reader.name].append(divergence)
            keys += rows
            on_rows(len(rows))
        for reader in others:
            reader.run_to_the_end()
    return _in_order(keys, parts, list(by_id))


class _Reader:
    """An arm, and the rows of logits that it has made and nobody has compared yet."""

    def __init__(self, arm: Arm, readings: Mapping[str, Reading]) -> None:
        self.name = arm.name
        self.rows: dict[RowKey, torch.Tensor] = {}
        self._engine = arm.engine
        self._readings = readings

    @property
    def has_work(self) -> bool:
        return self._engine.has_unfinished_requests

    def begin(self) -> None:
        self._engine.observe_logits(self._keep)
        for request_id, reading in self._readings.items():
            prompt = reading.token_ids[: reading.num_prompt_tokens]
            self._engine.add_request(request_id, prompt, reading.params)

    def end(self) -> None:
        """Leave nothing behind, also after an error."""
        self._engine.observe_logits(None)
        for request_id in self._readings:
            self._engine.abort_request(request_id)
        self.rows.clear()

    def step(self) -> None:
        try:
            requests = self._engine.step()
        except EngineError as error:
            raise EngineError(f"{self.name}: {error}") from error
        for request in requests:
            if request.error is not None:
                raise EngineError(f"{self.name}: {request.error}")

    def catch_up(self, rows: Mapping[RowKey, torch.Tensor]) -> None:
        """Step until there are all of these rows."""
        while not self.rows.keys() >= rows.keys():
            if not self.has_work:
                raise EngineError(f"{self.name} has ended before it made all of the logits.")
            self.step()

    def take(self, keys: Sequence[RowKey]) -> torch.Tensor:
        """Logits `[len(keys), vocab_size]`, which are forgotten here."""
        return torch.stack([self.rows.pop(key) for key in keys])

    def run_to_the_end(self) -> None:
        while self.has_work:
            self.step()

    def _keep(self, sequence: EngineSequence, position: int, row: torch.Tensor) -> None:
        # What the last token is followed by, nobody knows.
        if self._readings[sequence.request_id].follows(position) is not None:
            self.rows[sequence.request_id, position] = row


def _compare(
    base: _Reader, others: Sequence[_Reader], readings: Mapping[str, Reading]
) -> Iterator[list[Divergence]]:
    """Take the baseline's rows out of all arms, some at a time, and compare them."""
    keys = list(base.rows)
    for start in range(0, len(keys), _ROWS):
        some = keys[start : start + _ROWS]
        following = [readings[request_id].follows(position) for request_id, position in some]
        rows = base.take(some)
        yield Divergence.of_arms(
            rows,
            [reader.take(some) for reader in others],
            torch.tensor(following, device=rows.device),
        )


def _in_order(
    keys: Sequence[RowKey], parts: Mapping[str, Sequence[Divergence]], ids: Sequence[str]
) -> LockstepResult:
    """By reading and position, whatever the order of the steps."""
    place = {request_id: index for index, request_id in enumerate(ids)}
    ranks = [(place[request_id], position) for request_id, position in keys]
    order = numpy.array(sorted(range(len(keys)), key=ranks.__getitem__), dtype=numpy.int64)
    return LockstepResult(
        [keys[i][1] + 1 for i in order],
        {name: Divergence.concatenated(of)[order] for name, of in parts.items()},
    )
