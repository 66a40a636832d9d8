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

    With a swap space preempted ones are moved there and back, as long as there are slots for them
    and its disk works; evicted prefixes are fetched from it.
    `Modelless` checks every step: what slots hold, who was chosen, what is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = Modelless(NUM_BLOCKS)
        self.num_added = 0

    @initialize(
        prefix_caching=st.booleans(),
        chunked=st.booleans(),
        windows=st.sampled_from([(None,), (None, 6), (9,)]),
        num_reserved_tokens=st.sampled_from([0, 0, 8]),
        num_slots=st.sampled_from([0, 3, 12, 40]),
    )
    def choose(
        self,
        prefix_caching: bool,
        chunked: bool,
        windows: tuple[int | None, ...],
        num_reserved_tokens: int,
        num_slots: int,
    ) -> None:
        self.engine = Modelless(
            NUM_BLOCKS * len(windows),
            windows=windows,
            prefix_caching=prefix_caching,
            max_num_seqs=6,
            max_num_batched_tokens=10,
            enable_chunked_prefill=chunked,
            num_reserved_tokens=num_reserved_tokens,
            num_slots=num_slots,
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

    @precondition(lambda self: self.engine.disk is not None)
    @rule(fails=st.sampled_from([False, False, True]))
    def let_the_disk_fail(self, fails: bool) -> None:
        assert self.engine.disk is not None
        self.engine.disk.fails = fails

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
