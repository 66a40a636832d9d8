from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.serving.request_lengths import (
    Lengths,
    cut_prompts,
    draw_lengths,
    read_trace,
    scaled,
)

_TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""


def test_trace_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(_TRACE)
    assert read_trace(path, 2) == [Lengths(374, 44), Lengths(396, 109)]


@pytest.mark.parametrize(
    ("text", "count", "said"),
    [
        (_TRACE, 4, "has 3 requests"),
        ("time,tokens\n1,2\n", 1, "needs the columns"),
        (_TRACE.replace("374", "many"), 1, "needs the columns"),
        ("", 1, "has 0 requests"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, count: int, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_trace(path, count)


def test_one_factor_makes_the_longest_fit() -> None:
    lengths = [Lengths(3000, 1000), Lengths(400, 100), Lengths(1, 500), Lengths(2, 1)]
    assert scaled(lengths, 1000) == [
        Lengths(750, 250),
        Lengths(100, 25),
        Lengths(1, 125),
        Lengths(1, 1),
    ]


def test_lengths_that_fit_stay() -> None:
    lengths = [Lengths(30, 10), Lengths(1, 2)]
    assert scaled(lengths, 40) == lengths


@pytest.mark.parametrize("longest", [2, 3, 17, 256])
def test_scaled_lengths_fit_however_short(longest: int) -> None:
    for each in scaled(draw_lengths(500, seed=0), longest):
        assert each.prompt >= 1
        assert each.answer >= 1
        assert each.prompt + each.answer <= longest


def test_drawn_lengths_are_seeded_and_like_the_trace() -> None:
    lengths = draw_lengths(4001, seed=0)
    assert lengths == draw_lengths(4001, seed=0)
    assert lengths[:9] != draw_lengths(9, seed=1)
    # The medians of Azure's conversation trace are 1,020 and 129; a log-normal has its own.
    assert sorted(each.prompt for each in lengths)[2000] == pytest.approx(760, rel=0.1)
    assert sorted(each.answer for each in lengths)[2000] == pytest.approx(151, rel=0.1)
    assert max(each.prompt for each in lengths) == 4142


def test_prompts_have_the_lengths_asked_for_and_differ() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def encode(text: str) -> list[int]:
        # At the beginning of a text "ab" is one token, within it two.
        return [*text[1:].encode()] if text.startswith("ab") else [*text.encode()]

    token_ids = [*("ab" + "xyz" * 4 + "abc").encode()]
    prompts = cut_prompts(token_ids, [4, 3, 5, 4, 6, 6], decode, encode)
    assert [len(encode(prompt)) for prompt in prompts] == [4, 3, 5, 4, 6, 6]
    assert not any(prompt.startswith("ab") for prompt in prompts)


def test_a_text_shorter_than_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 tokens"):
        cut_prompts([1, 2, 3], [3], str, lambda text: [])
