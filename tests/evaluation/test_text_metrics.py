"""BLEU and ROUGE are the libraries' own, in any script; the rest is counted by hand."""

from __future__ import annotations

import math

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize as library_tokens

from tightkv.evaluation.text_metrics import (
    RougeScores,
    WordTokenizer,
    bleu,
    bleu_tokenizer,
    distinct_n,
    first_divergence,
    rouge,
)

ENGLISH = [
    ("The cat sat on the mat, didn't it?", "The cat sat on a mat; didn't it?"),
    ("Natalia sold 48/2 = 24 clips in May.\nShe sold 72.", "Natalia sold 24 clips in May."),
    ("snake_case and 3.14", "Snake case & 3.14!"),
    ("Nothing alike here at all", "Utterly different words"),
]
CHINESE = [
    ("今天天气很好,我们去公园散步。", "今天天气不好,我们在家看书。"),
    ("系统管理员可以用命令查看日志文件。", "管理员用命令查看系统的日志文件。"),
    ("北京是中国的首都", "上海"),
    ("编辑配置文件", "编辑配置文件然后重新启动服务"),
]
JAPANESE = "これはとてもながいぶんしょうです。日本語でかいてあります。"
THAI = "ภาษาไทยไม่มีช่องว่างระหว่างคำ"


def columns(pairs: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    answers, references = zip(*pairs, strict=True)
    return list(answers), list(references)


def by_library(answer: str, reference: str) -> RougeScores:
    """With the library's own tokenizer, which knows ASCII only."""
    scores = RougeScorer(["rouge1", "rouge2", "rougeL"]).score(reference, answer)
    return RougeScores(*(scores[name].fmeasure for name in ("rouge1", "rouge2", "rougeL")))


def latin(text: str) -> str:
    """Each letter as an ASCII word of its own; punctuation stays."""
    return "".join(f" w{ord(letter):x} " if letter.isalpha() else letter for letter in text)


@pytest.mark.parametrize(("answer", "reference"), ENGLISH)
def test_rouge_of_english_is_the_library_s(answer: str, reference: str) -> None:
    assert rouge(answer, reference) == by_library(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), CHINESE)
def test_rouge_of_chinese_is_that_of_characters(answer: str, reference: str) -> None:
    assert rouge(answer, reference) == by_library(latin(answer), latin(reference))


def test_rouge_of_chinese_by_hand() -> None:
    # Of 6 characters 5 are the same, of 5 pairs 3; 5 are a common subsequence.
    scores = rouge("今天天气很好", "今天天气不好")
    assert scores.rouge1 == pytest.approx(5 / 6)
    assert scores.rouge2 == pytest.approx(3 / 5)
    assert scores.rouge_l == pytest.approx(5 / 6)


@pytest.mark.parametrize("text", [JAPANESE, THAI])
def test_a_small_change_in_a_script_without_spaces_is_small(text: str) -> None:
    scores = rouge(text[:-2], text)
    assert 0.9 < scores.rouge2 < 1
    assert 90 < bleu([text[:-2]], [text]) < 100


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="ascii")))
def test_words_of_ascii_text_are_the_library_s(text: str) -> None:
    assert WordTokenizer().tokenize(text) == library_tokens(text, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Straße Ünï 10²", ["straße", "ünï", "10²"]),
        ("我爱Python3和C++", ["我", "爱", "python3", "和", "c"]),
        ("𠀀々", ["𠀀", "々"]),
        ("コンピュータでかく", ["コンピュータ", "で", "か", "く"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("ไม่มี", ["ไ", "ม่", "มี"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("co\u00adop \u0645\u06cc\u200c\u062e\u0648", ["coop", "\u0645\u06cc\u062e\u0648"]),
        ("… — 👍 <>&", []),
        ("", []),
    ],
)
def test_words_of_other_scripts(text: str, words: list[str]) -> None:
    assert WordTokenizer().tokenize(text) == words


def test_rouge_of_equal_texts_is_one() -> None:
    for text in ("", "👍", "Paris", "The cat sat.", "北京"):
        assert rouge(text, text) == RougeScores(1, 1, 1)


def test_rouge_against_an_empty_answer_is_zero() -> None:
    for answer, reference in [("", "The cat"), ("The cat", ""), ("北京", ""), ("👍", "👎")]:
        assert rouge(answer, reference) == RougeScores(0, 0, 0)


@pytest.mark.parametrize(
    ("pairs", "tokenizer"),
    [(ENGLISH, "13a"), (CHINESE, "zh"), ([*CHINESE, *ENGLISH, *CHINESE], "zh")],
    ids=["English", "Chinese", "mostly Chinese"],
)
def test_bleu_is_the_library_s(pairs: list[tuple[str, str]], tokenizer: str) -> None:
    answers, references = columns(pairs)
    expected = sacrebleu.corpus_bleu(answers, [references], tokenize=tokenizer).score
    assert 5 < expected < 95
    assert bleu(answers, references) == pytest.approx(expected, abs=1e-9)


def test_bleu_of_chinese_is_not_all_or_nothing() -> None:
    answers, references = columns(CHINESE)
    as_english = sacrebleu.corpus_bleu(answers, [references], tokenize="13a").score
    assert as_english < 1 < 20 < bleu(answers, references)


@pytest.mark.parametrize(
    ("texts", "tokenizer"),
    [
        (["The cat sat."], "13a"),
        (["今天天气很好"], "zh"),
        (["用 systemctl restart 命令重新启动这个服务", "ok"], "zh"),
        (["The word for it is 天气 in Chinese"], "13a"),
        (["한국어 문장입니다"], "13a"),
        ([JAPANESE], "char"),
        ([THAI], "char"),
        (["", "…"], "13a"),
    ],
)
def test_which_tokenizer_bleu_takes(texts: list[str], tokenizer: str) -> None:
    assert bleu_tokenizer(texts) == tokenizer


def test_bleu_of_equal_texts_is_100() -> None:
    for texts in (["Paris"], ["", ""], ["The cat sat on the mat.", "No."], ["北京"]):
        assert bleu(texts, texts) == 100


def test_bleu_with_empty_answers() -> None:
    text = "the cat sat on the mat and slept"
    assert bleu([""], [text]) == 0
    assert bleu([text], [""]) == 0
    missing = bleu(["", text], [text, text])
    assert 0 < missing < 50
    # Half of the words are missing: no n-gram is wrong, and the rest is the brevity penalty.
    assert missing == pytest.approx(100 * math.exp(1 - 16 / 8))
    assert bleu([text, "more words"], [text, ""]) < 100


def test_bleu_of_short_answers_counts_what_there_is() -> None:
    assert 0 < bleu(["New York"], ["New Jersey"]) < 100


def test_distinct_n() -> None:
    assert distinct_n([1, 2, 3, 4], 2) == 1
    assert distinct_n([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct_n([7] * 101, 2) == 1 / 100
    assert distinct_n([1, 2, 1, 2], 1) == 1 / 2
    assert distinct_n([1], 2) == distinct_n([], 2) == 1


@pytest.mark.parametrize(
    ("answer", "reference", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([5, 2], [1, 2], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [1], 0),
    ],
)
def test_first_divergence(answer: list[int], reference: list[int], position: int | None) -> None:
    assert first_divergence(answer, reference) == position
    assert first_divergence(tuple(answer), reference) == position
