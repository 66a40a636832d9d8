"""docs/cli.md is what the parsers say."""

from __future__ import annotations

from pathlib import Path

from tightkv.cli.document import page

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_flags_of_the_server_are_there() -> None:
    text = page()
    for flag in ("--host", "--api-key", "--served-model-name", "--swap-space", "--config"):
        assert f"`{flag}`" in text
