"""How texts, or lists of tokens, differ: BLEU, ROUGE, first divergence, repetition."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = [
    "RougeScores",
    "WordTokenizer",
    "bleu",
    "bleu_tokenizer",
    "distinct_n",
    "first_divergence",
    "rouge",
]

_HAN = re.compile(
    "[\u2e80-\u2fd5\u3005\u3007\u3021-\u3029\u3038-\u303b"  # radicals, iteration mark, numerals
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
# Hiragana; Thai, Lao; Burmese; Khmer.
_OTHER_UNSPACED = re.compile("[\u3041-\u3096\u309d-\u309f\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")


@dataclass(frozen=True, slots=True)
class RougeScores:
    """F1 of single words, of pairs of words, and of the longest common subsequence; 0 to 1."""

    rouge1: float
    rouge2: float
    rouge_l: float


class WordTokenizer:
    """Words in any script, in lower case, without punctuation and symbols.

    A word is a run of letters, digits and the marks on them. Scripts that put no spaces between
    words (Han, Hiragana, Thai, Lao, Burmese, Khmer) give a token per character, as the rules for
    word boundaries of Unicode's annex 29 do: else a sentence would be one word, and a score 0 or
    1. Of ASCII text this makes the words that rouge-score's own tokenizer makes; that one drops
    all other text.
    """

    def tokenize(self, text: str) -> list[str]:
        tokens: list[str] = []
        is_open, is_word = False, False
        for character in text.lower():
            category = unicodedata.category(character)
            if category == "Cf":
                continue  # joiners and soft hyphens stand inside words
            if category[0] not in "LMN":
                is_open = False
                continue
            is_single = _is_unspaced(character)
            if is_open and (category[0] == "M" or (is_word and not is_single)):
                tokens[-1] += character
            else:
                tokens.append(character)
                is_open, is_word = True, not is_single
        return tokens


def bleu(answers: Sequence[str], references: Sequence[str]) -> float:
    """SacreBLEU of all answers together, 0 to 100, with case, orders 1 to 4, smoothing "exp".

    Counts of n-grams are summed over the answers, so an empty one only misses what its reference
    has. Where no answer has four words, the orders that there are count (`effective_order`).

    Args:
        answers: of the arm.
        references: of the baseline, one per answer.
    """
    if list(answers) == list(references):
        return 100.0  # texts without words, too, for which the formula has no value
    from sacrebleu.metrics.bleu import BLEU

    # force: no warning about text that looks tokenized; it is what a model wrote.
    metric = BLEU(tokenize=bleu_tokenizer(references), effective_order=True, force=True)
    score = metric.corpus_score(list(answers), [list(references)]).score
    return min(float(score), 100.0)  # logarithm and exponential may give a last digit more


def bleu_tokenizer(references: Iterable[str]) -> str:
    """SacreBLEU's name of the tokenizer for these texts.

    Of their words, a Han character being one: "zh" if more than half are Han, else "char" if more
    than half are of scripts without spaces (Japanese has few Han characters, Thai has none), else
    "13a". The references alone decide, so that all arms are measured alike.
    """
    words = [word for text in references for word in WordTokenizer().tokenize(text)]
    if 2 * sum(_HAN.match(word) is not None for word in words) > len(words):
        return "zh"
    return "char" if 2 * sum(map(_is_unspaced, words)) > len(words) else "13a"


def rouge(answer: str, reference: str) -> RougeScores:
    """ROUGE-1, -2 and -L of one answer, by rouge-score with `WordTokenizer`, without stemming.

    Equal texts score 1, also those with too few words for pairs, where the library gives 0.
    """
    if answer == reference:
        return RougeScores(1.0, 1.0, 1.0)
    scores = _rouge_scorer().score(reference, answer)
    return RougeScores(*(float(scores[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")))


def distinct_n(token_ids: Sequence[int], n: int) -> float:
    """Different n-grams as a share of all (Li et al., arXiv:1510.03055); 1 if there are none."""
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def first_divergence(token_ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """How many tokens are equal before the first that is not; None if all are.

    Where one is the beginning of the other, its length.
    """
    if list(token_ids) == list(reference):
        return None
    pairs = zip(token_ids, reference, strict=False)
    differing = (index for index, (one, other) in enumerate(pairs) if one != other)
    return next(differing, min(len(token_ids), len(reference)))


def _is_unspaced(text: str) -> bool:
    """Whether it begins with a character of a script without spaces between words."""
    return bool(_HAN.match(text) or _OTHER_UNSPACED.match(text))


@cache
def _rouge_scorer() -> Any:
    # It brings nltk, which takes seconds: not before it is needed.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=WordTokenizer())
