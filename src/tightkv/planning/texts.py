"""The plan's words, `texts.yaml`: one table per language."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from tightkv.errors import ConfigError
from tightkv.planning.capacity_plan import Message
from tightkv.planning.units import format_bytes

__all__ = ["LANGUAGES", "Texts"]

LANGUAGES = ("en", "zh")
_SCALES = ("scale_dynamic", "scale_tensor", "scale_head", "scale_channel")


class Texts:
    """The sentences of one language."""

    def __init__(self, language: str) -> None:
        """Read them.

        Raises:
            ConfigError: for a language that there is not.
        """
        if language not in LANGUAGES:
            raise ConfigError(f"Unknown language {language!r}: choose {' or '.join(LANGUAGES)}.")
        self._sentences = all_texts()[language]

    def __call__(self, key: str, **values: Any) -> str:
        """A sentence with its values; those whose name ends in `_bytes` are shown in GiB."""
        shown = {
            name: format_bytes(value) if name.endswith("_bytes") else value
            for name, value in values.items()
        }
        return self._sentences[key].format(**shown)

    def translated(self, words: str) -> str:
        """What `TensorFormat.describe` says, in this language."""
        for key in _SCALES:
            words = words.replace(all_texts()["en"][key], self._sentences[key])
        return words

    def of(self, message: Message) -> str:
        return self(message.key, **message.values)


@lru_cache
def all_texts() -> Mapping[str, Mapping[str, str]]:
    """Every sentence by language and key."""
    text = files("tightkv.planning").joinpath("texts.yaml").read_text(encoding="utf-8")
    tables: Mapping[str, Mapping[str, str]] = yaml.safe_load(text)
    return tables
