"""Text to calibrate on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightkv.calibration.data import cut_windows, read_documents
from tightkv.errors import RequestError
from tightkv.models import LoadedModel
from tiny_engine import loaded
from tiny_models import BOS, save_tiny_model

TEXT = "".join(chr(97 + (i * 7 + i // 26) % 26) for i in range(4000))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def test_files_of_text_and_of_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("some text")
    messages = [{"role": "user", "content": "hi"}]
    lines.write_text(
        f'{{"text": "one"}}\n\n{json.dumps({"messages": messages})}\n"plain"\n{{"prompt": "ask"}}\n'
    )
    documents = read_documents([str(text), str(lines)])
    assert documents == ["some text", "one", messages, "plain", "ask"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{', "line 2 is not JSON"),
        ('{"question": "a"}', "line 1 has neither"),
        ('{"messages": ["a"]}', "line 1 has neither"),
        ("3", "line 1 has neither"),
    ],
)
def test_lines_that_are_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        read_documents([str(path)])


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_documents([str(tmp_path / "no.txt")])
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="cannot be read"):
        read_documents([str(tmp_path / "c.txt")])
    with pytest.raises(RequestError, match=r"no file|cannot be read"):
        read_documents(["no-such-data-set-anywhere"])


def test_windows_hold_every_token_once(model: LoadedModel) -> None:
    text = cut_windows([TEXT], model, ["a.txt"], num_samples=8, max_seq_len=100, seed=0)
    assert (text.num_tokens, text.num_held_out_tokens) == (600, 200)
    assert [len(w) for w in [*text.measured, *text.held_out]] == [100] * 8
    assert len({tuple(w) for w in [*text.measured, *text.held_out]}) == 8
    assert text.sources == ("a.txt",)


def test_the_seed_decides(model: LoadedModel) -> None:
    def windows(seed: int) -> list[list[int]]:
        return cut_windows([TEXT] * 3, model, ["a"], 2, 64, seed).measured

    assert windows(1) == windows(1)
    assert windows(1) != windows(2)


def test_conversations_go_through_the_template(model: LoadedModel) -> None:
    chat = [{"role": "user", "content": "x" * 90}]
    text = cut_windows([chat], model, ["a"], 1, 128, 0)
    tokens = [token for w in [*text.measured, *text.held_out] for token in w]
    assert model.tokenizer.decode(tokens) == "user: " + "x" * 90 + "\n"


def test_few_tokens_are_cut_in_four(model: LoadedModel) -> None:
    text = cut_windows(["y" * 64], model, ["a"], 64, 512, 0)
    assert ([len(w) for w in text.measured], [len(w) for w in text.held_out]) == ([48], [16])


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["y" * 63], {}, "has 63 tokens: give at least 64"),
        ([], {}, "has 0 tokens"),
        ([""], {}, "has 0 tokens"),
        (["<bos>" * 100], {"max_seq_len": 256}, "special tokens only"),
        (["y" * 100], {"num_samples": 0}, "num_samples is 0"),
        (["y" * 100], {"max_seq_len": 513}, "512 positions"),
        ([[{"role": "user"}]], {}, "has .* tokens|cannot render"),
    ],
)
def test_text_that_cannot_be_used(
    model: LoadedModel, documents: list[object], options: dict[str, int], message: str
) -> None:
    settings = {"num_samples": 4, "max_seq_len": 64, "seed": 0, **options}
    assert model.tokenizer.convert_tokens_to_ids("<bos>") == BOS
    with pytest.raises(RequestError, match=message):
        cut_windows(documents, model, ["a"], **settings)  # type: ignore[arg-type]
