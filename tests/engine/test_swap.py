"""What preempted sequences find in the swap space; their tokens: test_tight_pool."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv import LLM, SamplingParams
from tightkv.errors import ConfigError, SwapError
from tightkv.kvcache import SwappingKVCacheManager, swap_memory, swap_space
from tightkv.kvcache.swap_space import SwapSpace
from tightkv.models import loader
from tiny_engine import GREEDY, prompts, tiny_llm, token_ids
from tiny_models import save_tiny_model

POOL_TOKENS = 40 * 16
# Room for two of the prompts, not for their answers.
TIGHT = 112
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with one layer group, and one with two."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what does not depend on the model."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def swapping(folder: Path, **options: Any) -> LLM:
    """An engine that swaps whatever it costs: tiny models compute faster than a disk writes."""
    llm = tiny_llm(folder, **{"swap_space": 0.01, "preemption_mode": "swap", **options})
    llm.engine.scheduler.num_reserved_tokens = 0  # so that some are preempted
    return llm


def space_of(llm: LLM) -> SwapSpace:
    space = llm.engine.swap_space
    assert space is not None
    return space


def check_empty(llm: LLM) -> None:
    manager = llm.engine.manager
    manager.check_integrity()
    assert manager.num_sequences == 0
    assert manager.num_free_blocks == manager.num_blocks
    if isinstance(manager, SwappingKVCacheManager):
        assert manager.num_swapped == 0
        assert manager.swap_space.num_used_slots == 0


def traffic() -> list[tuple[str, list[int], SamplingParams]]:
    """Requests whose prompts share beginnings of odd lengths."""
    source = random.Random(0)
    beginnings = [[source.randrange(250) for _ in range(n)] for n in (17, 33, 61, 95)]
    requests = []
    for index in range(28):
        begin = source.choice(beginnings)
        tail = [source.randrange(250) for _ in range(source.randint(1, 40))]
        params = SamplingParams(
            temperature=0, max_tokens=source.randint(20, 70), ignore_eos=True, detokenize=False
        )
        requests.append((str(index), begin[: source.randint(1, len(begin))] + tail, params))
    return requests


def serve(llm: LLM) -> Tokens:
    """Tokens of the requests, which come some at a time."""
    source = random.Random(0)
    engine, waiting = llm.engine, list(reversed(traffic()))
    finished: Tokens = {}
    while waiting or engine.has_unfinished_requests:
        for _ in range(source.randint(0, 3)):
            if waiting:
                engine.add_request(*waiting.pop())
        for request in engine.step():
            if request.is_finished:
                finished[request.request_id] = list(request.sequences[0].token_ids)
    check_empty(llm)
    return finished


def test_swapped_tokens_are_not_computed_anew(folder: Path) -> None:
    roomy, tight = tiny_llm(folder), swapping(folder, pool_tokens=TIGHT)
    assert token_ids(tight, prompts()) == token_ids(roomy, prompts())
    assert tight.engine.stats.num_swaps > 0
    for name in ("prompt_tokens", "generation_tokens"):
        assert getattr(tight.engine.stats, name) == getattr(roomy.engine.stats, name)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, logprobs=2, max_tokens=40, ignore_eos=True),
        SamplingParams(n=2, temperature=0.8, seed=7, max_tokens=30, ignore_eos=True),
    ],
)
def test_all_that_a_request_asks_for_survives(folder: Path, params: SamplingParams) -> None:
    roomy = tiny_llm(folder, pool_tokens=2048).generate(prompts(4, 60), params)
    for prefix_caching in (True, False):
        tight = swapping(folder, pool_tokens=192, enable_prefix_caching=prefix_caching)
        again = tight.generate(prompts(4, 60), params)
        assert [output.outputs for output in again] == [output.outputs for output in roomy]
        assert [o.prompt_logprobs for o in again] == [o.prompt_logprobs for o in roomy]
        assert tight.engine.stats.num_swaps > 0
        check_empty(tight)


def test_evicted_prefixes_are_found_again(folder: Path) -> None:
    llm = swapping(folder, pool_tokens=128, max_num_seqs=1)
    first = llm.generate(prompts(4, 60), GREEDY)
    again = llm.generate(prompts(4, 60), GREEDY)
    assert [output.outputs for output in again] == [output.outputs for output in first]
    # All full blocks of a prompt but for its last token.
    assert [output.num_cached_tokens for output in again] == [48, 64, 64, 64]
    assert llm.engine.stats.num_fetched_tokens > 100
    assert space_of(llm).num_kept_slots > 0
    llm.engine.manager.reset_prefix_cache()
    assert llm.generate(prompts(4, 60), GREEDY)[0].num_cached_tokens == 0


def test_a_fetch_leaves_the_reserve(folder: Path) -> None:
    """Or blocks would be filled for a sequence that may not start."""
    llm = swapping(folder, pool_tokens=128, max_num_seqs=1)
    llm.generate(prompts(4, 60), GREEDY)
    manager, stats, prompt = llm.engine.manager, llm.engine.stats, prompts(4, 60)[0]
    hasher, before = manager.new_hasher("again"), stats.num_fetched_tokens
    for num_reserved, found in ((manager.num_blocks, 0), (0, 48)):
        assert found == manager.get_computed_blocks(
            "again/0", hasher, prompt, len(prompt) - 1, num_reserved=num_reserved
        )
        assert stats.num_fetched_tokens == before + found
        manager.free("again/0")


def test_the_decision_counts_what_is_moved(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = swapping(folder, pool_tokens=TIGHT, enable_prefix_caching=False)
    with caplog.at_level(logging.DEBUG, logger="tightkv"):
        token_ids(llm, prompts())
    counted = [re.search(r"([\d,]+) bytes out", record.getMessage()) for record in caplog.records]
    num_bytes = sum(int(found[1].replace(",", "")) for found in counted if found)
    moved = llm.engine.stats.num_swapped_out_blocks
    assert num_bytes == moved * space_of(llm).slot_bytes > 0


def test_auto_does_what_costs_less(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = token_ids(tiny_llm(folder), prompts())
    for tokens_per_second, word in ((1e12, "recompute"), (1e-3, "swap")):
        llm = swapping(folder, pool_tokens=TIGHT, preemption_mode="auto")
        llm.engine.swap_space.costs.prefill.note(1e6 * tokens_per_second, 1e6)  # type: ignore[union-attr]
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="tightkv"):
            assert token_ids(llm, prompts()) == expected
        decisions = [r.getMessage() for r in caplog.records if "Preempted" in r.getMessage()]
        stats = llm.engine.stats
        assert len(decisions) == stats.num_preemptions > 0
        assert all(f": {word} (mode auto" in line for line in decisions)
        assert stats.num_swaps == (stats.num_preemptions if word == "swap" else 0)


def test_recompute_keeps_the_second_tier(folder: Path) -> None:
    llm = swapping(folder, pool_tokens=TIGHT, preemption_mode="recompute")
    space_of(llm).costs.ignores_costs = True
    expected = token_ids(tiny_llm(folder), prompts())
    for _ in range(2):
        assert token_ids(llm, prompts()) == expected
    stats = llm.engine.stats
    assert (stats.num_swaps, stats.num_preemptions > 0) == (0, True)
    assert stats.num_fetched_tokens > 0


def test_speed_of_prompts_is_measured(llama: Path) -> None:
    llm = swapping(llama)
    assert space_of(llm).costs.prefill.per_second is None
    token_ids(llm, prompts())
    assert (space_of(llm).costs.prefill.per_second or 0) > 10


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_failing_disk_falls_back_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    llm = swapping(folder, pool_tokens=POOL_TOKENS, max_num_seqs=16)
    expected = serve(tiny_llm(folder, pool_tokens=8192, max_num_seqs=16))
    source = random.Random(1)
    working = getattr(space_of(llm)._memory, way)

    def fail(first: int, rows: torch.Tensor) -> None:
        if source.random() < 0.5:
            raise SwapError("the disk is full")
        working(first, rows)

    monkeypatch.setattr(space_of(llm)._memory, way, fail)
    assert serve(llm) == expected
    stats = llm.engine.stats
    assert stats.num_swap_fallbacks > 0
    assert stats.num_swaps > 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["Swap space: the disk is full; blocks are computed anew instead."]


def test_a_small_swap_space_takes_what_it_can(folder: Path) -> None:
    options = {"max_num_seqs": 16, "kv_cache_dtype": "int8"}
    expected = serve(tiny_llm(folder, pool_tokens=8192, **options))
    slot_bytes = space_of(swapping(folder, **options)).slot_bytes
    llm = swapping(folder, pool_tokens=POOL_TOKENS, swap_space=6 * slot_bytes / 2**30, **options)
    assert space_of(llm).num_slots == 6
    assert serve(llm) == expected
    stats = llm.engine.stats
    assert stats.num_swaps > 0
    assert stats.num_swap_fallbacks > 0


def test_an_aborted_sequence_leaves_no_slots(llama: Path) -> None:
    llm = swapping(llama, pool_tokens=TIGHT)
    engine = llm.engine
    for index, prompt in enumerate(prompts()):
        engine.add_request(str(index), prompt, GREEDY)
    manager = engine.manager
    assert isinstance(manager, SwappingKVCacheManager)
    while manager.num_swapped == 0:
        engine.step()
    assert space_of(llm).num_used_slots > 0
    for request in engine.requests:
        engine.abort_request(request.request_id)
    check_empty(llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"swap_space": -1}, "swap_space is -1: it must be a number of GiB, at least 0."),
        ({"swap_space": float("nan")}, "swap_space is nan"),
        ({"swap_space": float("inf")}, "swap_space is inf"),
        ({"swap_space": "4"}, "swap_space is '4'"),
        ({"swap_space": 1e300}, "GiB free"),
        ({"swap_space": 1e-9}, "less than a block's"),
        ({"swap_space": 0.01, "swap_dir": "/absent/folder"}, "cannot be made"),
        ({"swap_space": 0.01, "swap_dir": "/proc"}, "swap_dir /proc"),
        ({"swap_dir": "/tmp"}, "swap_space is 0"),
        ({"preemption_mode": "swap"}, "swap_space is 0"),
        ({"preemption_mode": "move", "swap_space": 0.01}, "auto, swap, recompute"),
    ],
)
def test_what_is_refused(llama: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_llm(llama, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_less_than_a_block_is_refused_before_weights_load(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_load_weights", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match=r"less than a block's \d+ bytes: raise it"):
        LLM(str(llama), swap_space=1e-6)


# What happens to a process of its own.


def start(model: Path, folder: Path, tests: Path = Path(__file__).parents[1]) -> Any:
    """A process that swaps without end, and says a line for each step once it has."""
    program = f"""
        import sys
        sys.path.insert(0, {str(tests)!r})
        from pathlib import Path
        from tiny_engine import GREEDY, prompts, tiny_llm

        llm = tiny_llm(
            Path({str(model)!r}),
            pool_tokens={TIGHT},
            swap_space=0.01,
            swap_dir={str(folder)!r},
            preemption_mode="swap",
        )
        engine, number = llm.engine, 0
        engine.scheduler.num_reserved_tokens = 0
        while True:
            while len(engine.requests) < 4:
                engine.add_request(str(number), prompts()[number % 4], GREEDY)
                number += 1
            engine.step()
            if engine.stats.num_swaps > 3:
                print(engine.manager.num_swapped, engine.stats.num_swap_fallbacks, flush=True)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_is_left_after_kill_9(llama: Path, tmp_path: Path) -> None:
    swap_dir = tmp_path / "swap"
    with start(llama, swap_dir) as process:
        assert process.stdout is not None
        swapped = any(line.startswith(("1", "2")) for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr and process.stderr.read()
    assert swapped
    assert list(swap_dir.iterdir()) == []
    llm = swapping(llama, pool_tokens=TIGHT, swap_dir=str(swap_dir))
    assert token_ids(llm, prompts()) == token_ids(tiny_llm(llama), prompts())
    assert llm.engine.stats.num_swaps > 0
    assert list(swap_dir.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tightkv-test", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(llama: Path, small_disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"swap_space is 0\.02 GiB.*has 0\.02 GiB free|memory"):
        swapping(llama, swap_space=0.02, swap_dir=str(small_disk))
    assert list(small_disk.iterdir()) == []
    llm = swapping(llama, pool_tokens=TIGHT, swap_dir=str(small_disk))
    left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    (small_disk / "others").write_bytes(bytes(left))
    with pytest.raises(ConfigError, match=r"has 0\.00 GiB free"):
        swapping(llama, swap_dir=str(small_disk))
    # What was set apart at the start can be written still.
    assert token_ids(llm, prompts()) == token_ids(tiny_llm(llama), prompts())
    assert (llm.engine.stats.num_swaps > 0, llm.engine.stats.num_swap_fallbacks) == (True, 0)


def test_a_disk_that_fills_up_while_swapping(
    llama: Path,
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a file system that does not set the bytes apart."""
    monkeypatch.setattr(swap_memory, "_reserve", os.truncate)
    monkeypatch.setattr(swap_space, "_PIECE_BYTES", 1)  # the copy that is timed is a slot then
    llm = swapping(llama, pool_tokens=TIGHT, swap_dir=str(small_disk))
    left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    (small_disk / "others").write_bytes(bytes(left))
    for _ in range(2):
        assert token_ids(llm, prompts()) == token_ids(tiny_llm(llama), prompts())
    check_empty(llm)
    stats = llm.engine.stats
    assert stats.num_swap_fallbacks > 0
    assert stats.num_preempted_tokens > 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "Swap space: the swap file cannot be written (No space left on device); "
        "blocks are computed anew instead."
    ]
