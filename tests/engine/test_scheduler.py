"""Who takes part in a step, who is admitted, who is preempted, and that all come to their ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from modelless import BLOCK_SIZE, Modelless
from tightkv import LLM
from tightkv.engine.scheduler import Scheduler
from tightkv.kvcache.block_pool import BlockPool
from tiny_engine import GREEDY, prompts, tiny_llm
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def running_after_each_step(llm: LLM, together: list[list[int]], num_steps: int) -> list[int]:
    """Numbers of sequences that run, for prompts that come together."""
    for index, prompt in enumerate(together):
        llm.engine.add_request(f"request {index}", prompt, GREEDY)
    counts = []
    for _ in range(num_steps):
        llm.engine.step()
        counts.append(len(llm.engine.scheduler.running))
    return counts


def test_a_step_with_work_enough_begins_no_other_prompt(folder: Path) -> None:
    """The first prompt would wait for the second, which is not done sooner by that."""
    llm = tiny_llm(folder, max_num_batched_tokens=512)
    assert running_after_each_step(llm, prompts(3, 200), 4) == [1, 2, 3, 3]


def test_short_prompts_share_a_step(folder: Path) -> None:
    llm = tiny_llm(folder, max_num_batched_tokens=512)
    assert running_after_each_step(llm, prompts(4, 8), 1) == [4]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    return [1000 + seed, *random.Random(seed).choices(range(2), k=length - 1)]


# ---- no deadlock, no starvation ----


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_first_of_all_is_never_preempted_and_all_end(seed: int, prefix_caching: bool) -> None:
    """Hostile loads: any of the sequences needs the whole pool at its end."""
    source = random.Random(seed)
    num_blocks = source.randint(4, 12)
    engine = Modelless(
        num_blocks, prefix_caching=prefix_caching, enable_chunked_prefill=seed % 2 == 0
    )
    for number in range(12):
        length = source.randint(1, num_blocks * BLOCK_SIZE - 1)
        engine.add(
            str(number),
            prompt(length, seed=number % 3),
            num_blocks * BLOCK_SIZE - length,
            n=source.choice([1, 1, 2]),
            priority=source.choice([0, 0, 1]),
        )
        engine.step()
    engine.drain()  # which fails after more steps than it can take
    assert engine.stats.num_preemptions > 0


def test_one_that_fills_the_pool_runs_alone_to_its_end() -> None:
    """The reserve is for others: it needs none."""
    engine = Modelless(8, num_reserved_tokens=64)
    engine.add("all of it", prompt(7 * BLOCK_SIZE), BLOCK_SIZE)
    engine.drain()
    assert engine.stats.num_preemptions == 0


def test_a_long_prompt_is_not_passed_by_a_stream_of_short_ones() -> None:
    engine = Modelless(16, max_num_seqs=64)
    count = 0

    def add_short() -> None:
        nonlocal count
        count += 1
        engine.add(f"short {count}", prompt(6, seed=count), 6)

    for _ in range(6):
        add_short()
        engine.step()
    before = count
    (long,) = engine.add("long", prompt(15 * BLOCK_SIZE), 4)
    steps = 0
    # Those that ran end, 15 blocks of prompt come in chunks, then 4 tokens.
    while not long.is_finished and steps < 40:
        add_short()
        engine.step()
        steps += 1
    assert long.is_finished
    first_after = engine.started.index("long/0") + 1
    assert engine.started.index(f"short {before}/0") < first_after
    assert all(int(name.split("/")[0].split()[1]) > before for name in engine.started[first_after:])


@pytest.mark.parametrize("num_cached", [0, 480])
def test_a_long_prompt_that_waits_is_not_looked_up_in_each_step(
    monkeypatch: pytest.MonkeyPatch, num_cached: int
) -> None:
    engine = Modelless(520, max_num_seqs=9, max_num_batched_tokens=1920)
    long = prompt(500 * BLOCK_SIZE)
    if num_cached:
        engine.add("its beginning", long[: num_cached * BLOCK_SIZE], 1)
        engine.drain()
    for number in range(8):
        engine.add(str(number), prompt(8, seed=number + 1), 30)
    engine.step()
    engine.add("long", long, 4)
    looked_up: list[int] = []
    find = BlockPool.find

    def count(pool: BlockPool, block_hash: bytes) -> int | None:
        looked_up[-1] += 1
        return find(pool, block_hash)

    monkeypatch.setattr(BlockPool, "find", count)
    while "long/0" not in engine.started:
        looked_up.append(0)
        engine.step()
    assert len(looked_up) > 20
    # It is looked up when it comes, and when there is room for it.
    assert looked_up[0] >= num_cached
    assert sum(looked_up[1:-1]) <= 2 * len(looked_up)
    assert looked_up[-1] >= num_cached


def test_who_waits_begins_as_soon_as_another_has_computed_its_beginning() -> None:
    """Though no block became free: those that it lacked are shared."""
    engine = Modelless(30, max_num_seqs=4, max_num_batched_tokens=8)
    shared = prompt(20 * BLOCK_SIZE)
    engine.add("first", shared, 30)
    engine.step()
    engine.add("second", [*shared, 7], 3)
    free = []
    while "second/0" not in engine.started:
        free.append(engine.manager.num_free_blocks)
        engine.step()
    assert len(free) > 5
    assert free == sorted(free, reverse=True)
    engine.drain()


def test_a_sequence_that_is_preempted_again_and_again_ends() -> None:
    """The cheapest is preempted for the others, but only for those before it in the order."""
    engine = Modelless(10, max_num_seqs=64)
    for number in range(4):
        engine.add(f"long {number}", prompt(10, seed=number), 26)
    (short,) = engine.add("cheap", prompt(5, seed=9), 30)
    steps = 0
    # Nothing that came later is before it: the work of the others and its own is a bound.
    while not short.is_finished and steps < 5 * 36:
        engine.step()
        steps += 1
        engine.add(f"later {steps}", prompt(3, seed=10 + steps), 20)
    assert short.is_finished
    assert short.num_preemptions > 0


# ---- decodes ----


@pytest.mark.parametrize("chunked", [True, False])
def test_a_long_prompt_holds_up_no_decode_for_more_than_a_step(chunked: bool) -> None:
    """`Modelless` checks that every one that decodes has its token in each step."""
    engine = Modelless(64, max_num_batched_tokens=12, enable_chunked_prefill=chunked)
    decoding = [engine.add(str(i), prompt(3, seed=i), 40)[0] for i in range(4)]
    engine.step()
    engine.add("long", prompt(60, seed=9), 4, priority=-1)
    for _ in range(6):
        before = [sequence.num_tokens for sequence in decoding]
        chunks = engine.step()
        assert [sequence.num_tokens for sequence in decoding] == [count + 1 for count in before]
        if chunked:
            assert sum(chunk.num_tokens for chunk in chunks) <= 12
    engine.drain()


def test_whole_prompts_longer_than_the_budget_come_one_a_step() -> None:
    engine = Modelless(64, max_num_batched_tokens=12, enable_chunked_prefill=False)
    for number in range(3):
        engine.add(str(number), prompt(20, seed=number), 4)
    sizes = [sorted(chunk.num_tokens for chunk in engine.step()) for _ in range(3)]
    assert sizes == [[20], [1, 20], [1, 1, 20]]


# ---- who is preempted, who is admitted ----


@pytest.mark.parametrize(
    ("lengths", "priorities", "victims"),
    [
        ((4, 8, 20), (0, 0, 0), [1]),  # the cheapest, though not the youngest
        ((4, 20, 8), (0, 0, 0), [2]),
        ((4, 12, 12), (0, 0, 0), [2]),  # of equally cheap ones the youngest
        ((4, 8, 20), (0, 0, 1), [2]),  # the least urgent, whatever it costs
        ((4, 8, 20), (2, 0, 1), [0, 2]),  # then one that has none behind it: it goes itself
    ],
)
def test_the_cheapest_of_the_least_urgent_is_preempted(
    lengths: tuple[int, ...], priorities: tuple[int, ...], victims: list[int]
) -> None:
    engine = Modelless(40, max_num_batched_tokens=64)
    sequences = [
        engine.add(str(i), prompt(length, seed=i), 40, priority=priority)[0]
        for i, (length, priority) in enumerate(zip(lengths, priorities, strict=True))
    ]
    engine.step()
    assert len(engine.scheduler.running) == 3
    # With nothing free each of them needs a block of another.
    pool = engine.manager._pool
    taken = pool.allocate(pool.num_free_blocks)
    assert engine.scheduler.schedule()
    assert [i for i, sequence in enumerate(sequences) if sequence.num_preemptions] == victims
    pool.free(taken)


def test_shared_blocks_cost_nothing() -> None:
    """They stay with the others that use them."""
    engine = Modelless(40, max_num_batched_tokens=64)
    shared = prompt(16, seed=1)
    engine.add("first", shared, 20)
    engine.step()
    engine.add("sharing", [*shared, 5, 6], 20)
    engine.add("own", prompt(8, seed=2), 20)
    engine.step()
    sharing, own = engine.scheduler.running[1:]
    assert sharing.num_computed_tokens > own.num_computed_tokens
    assert engine.scheduler._victim(0) is sharing


def test_tokens_lost_to_preemption_are_counted() -> None:
    engine = Modelless(10)
    for number in range(3):
        engine.add(str(number), prompt(9, seed=number), 20)
    lost = 0
    while engine.scheduler.has_work:
        computed = {s: s.num_computed_tokens for s in engine.scheduler.running}
        before = {s: s.num_preemptions for s in computed}
        engine.step()
        lost += sum(computed[s] for s in computed if s.num_preemptions > before[s])
    assert engine.stats.num_preempted_tokens == lost > 0


def test_one_that_would_take_the_room_of_those_that_run_waits() -> None:
    """Without the reserve it would start, and somebody would be preempted a few steps later."""
    engine = Modelless(8, num_reserved_tokens=64)
    engine.add("a", prompt(12, seed=1), 12)
    engine.step()
    engine.add("b", prompt(12, seed=2), 8)
    engine.step()
    assert [s.request_id for s in engine.scheduler.running] == ["a"]
    engine.drain()
    assert engine.stats.num_preemptions == 0


def test_no_more_is_reserved_than_can_be_used() -> None:
    """Answers have a longest length: blocks behind it are nobody's."""
    engine = Modelless(8, num_reserved_tokens=64)
    engine.add("a", prompt(12, seed=1), 4)
    engine.step()
    engine.add("b", prompt(12, seed=2), 8)
    engine.step()
    assert [s.request_id for s in engine.scheduler.running] == ["a", "b"]


# ---- order ----


def test_the_lowest_priority_starts_first() -> None:
    engine = Modelless(64, max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0), ("e", -1)):
        engine.add(name, prompt(4), 3, priority=priority)
    engine.drain()
    assert engine.started == ["c/0", "e/0", "a/0", "d/0", "b/0"]


def test_a_preempted_sequence_keeps_its_place() -> None:
    engine = Modelless(64, max_num_seqs=2)
    for name in "abcd":
        engine.add(name, prompt(4), 3)
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    assert [s.request_id for s in engine.scheduler.waiting] == ["a", "c", "d"]


# ---- checks ----


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda s: s.running.reverse(), "out of order"),
        (lambda s: s.running.pop(), "nobody's"),
        (lambda s: s._manager.free(s.running[0].seq_id), "has 0 blocks"),
        (lambda s: setattr(s.running[0], "num_computed_tokens", 9), "has 2 blocks"),
        (lambda s: s.waiting.append(s.running.pop()), "is running"),
    ],
)
def test_check_integrity_notices(break_it: Callable[[Scheduler], object], words: str) -> None:
    engine = Modelless(64)
    for number in range(3):
        engine.add(str(number), prompt(5, seed=number), 3)
    engine.step()
    break_it(engine.scheduler)
    with pytest.raises(AssertionError, match=words):
        engine.scheduler.check_integrity()
