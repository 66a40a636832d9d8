"""docs/metrics.md is what the catalogue gives."""

from __future__ import annotations

from pathlib import Path

from tightkv.metrics.document import page

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page(), "run `make docs`"
