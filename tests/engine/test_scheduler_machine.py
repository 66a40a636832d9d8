"""Random histories of the scheduler: whatever comes, all that is not aborted comes to its end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from modelless import Modelless

# Few prompts, cut anywhere, so that beginnings are often equal.
PROMPTS = ([0] * 40, [1] * 40, [0] * 8 + [1] * 32)
NUM_BLOCKS = 12  # of 4 tokens: the longest sequence alone takes 11


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, share, fork, are preempted and aborted, in a pool that is too small.

    `Modelless` checks every step: what slots hold, who was chosen, what is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = Modelless(NUM_BLOCKS)
        self.num_added = 0

    @initialize(
        prefix_caching=st.booleans(),
        chunked=st.booleans(),
        num_groups=st.sampled_from([1, 2]),
        num_reserved_tokens=st.sampled_from([0, 0, 8]),
    )
    def choose(
        self, prefix_caching: bool, chunked: bool, num_groups: int, num_reserved_tokens: int
    ) -> None:
        self.engine = Modelless(
            NUM_BLOCKS,
            num_groups=num_groups,
            prefix_caching=prefix_caching,
            max_num_seqs=6,
            max_num_batched_tokens=10,
            enable_chunked_prefill=chunked,
            num_reserved_tokens=num_reserved_tokens,
        )

    @precondition(lambda self: len(self.engine.unfinished) < 8)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        cut=st.integers(1, 30),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def add(self, prompt: list[int], cut: int, max_tokens: int, n: int, priority: int) -> None:
        self.num_added += 1
        self.engine.add(str(self.num_added), prompt[:cut], max_tokens, n=n, priority=priority)

    @precondition(lambda self: self.engine.unfinished)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of one that waits, is in the middle of its prompt, or decodes."""
        self.engine.abort(data.draw(st.sampled_from(list(self.engine.unfinished))))
        self.engine.check_integrity()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.engine.scheduler
        scheduler._preempt(data.draw(st.sampled_from(scheduler.running)))
        self.engine.check_integrity()

    @precondition(lambda self: self.num_added % 5 == 4)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.manager.reset_prefix_cache()
        self.engine.check_integrity()

    def teardown(self) -> None:
        self.engine.drain()


class LongSchedulerMachine(SchedulerMachine):
    """The same, 10,000 rules in all."""


SchedulerMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None
)
LongSchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None
)

TestScheduler = SchedulerMachine.TestCase
TestSchedulerLong = pytest.mark.slow(LongSchedulerMachine.TestCase)
