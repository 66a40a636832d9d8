from __future__ import annotations

import re
from pathlib import Path

import pytest

import tightkv.planning
from tightkv.errors import ConfigError
from tightkv.planning import LANGUAGES, Texts
from tightkv.planning.texts import all_texts

_FIELD = re.compile(r"\{(\w+)[^}]*\}")


def test_both_languages_have_the_same_sentences_with_the_same_values() -> None:
    tables = all_texts()
    assert set(tables) == set(LANGUAGES)
    assert set(tables["en"]) == set(tables["zh"])
    for key, sentence in tables["en"].items():
        translated = tables["zh"][key]
        assert set(_FIELD.findall(sentence)) == set(_FIELD.findall(translated)), key


def test_chinese_is_chinese() -> None:
    """Only patterns of values and names may be without a Chinese character."""
    exempt = {"devices", "devices_one"}
    plain = {k for k, v in all_texts()["zh"].items() if not re.search("[\u4e00-\u9fff]", v)}
    assert plain <= exempt


def test_every_sentence_is_used_and_every_key_exists() -> None:
    folder = Path(tightkv.planning.__file__).parent
    sources = [*folder.glob("*.py"), folder.parent / "cli" / "plan.py"]
    sources += folder.parent.joinpath("capacity").glob("*.py")
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    made: tuple[str, ...] = (
        "term_",
        "col_",
        "basis_weights_",
        "kind_",
        "note_window_",
        "rec_utilization_",
    )
    made += ("engine_", "what_", "bound_")
    for key in all_texts()["en"]:
        assert f'"{key}"' in code or key.startswith(made), key
    for key in re.findall(r'Message\("(\w+)"', code):
        assert key in all_texts()["en"], key


def test_an_unknown_language() -> None:
    with pytest.raises(ConfigError, match="en or zh"):
        Texts("fr")
