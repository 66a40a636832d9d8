"""The tables of docs/formats.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tightkv.errors import ScaleError
from tightkv.formats import KV_CACHE_DTYPES, TensorFormat, TensorScale, resolve_format
from tightkv.formats.base import CODE_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
MODEL_DTYPES = (torch.float32, torch.bfloat16)
SCALES = {
    "none": None,
    "static": TensorScale(torch.ones(())),
    "two-factor": TensorScale(torch.ones(()), dynamic=True),
}


def table(first_column: str) -> list[list[str]]:
    """Cells of the table whose heading starts with this column."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


ROWS = {(row[0].strip("`"), row[1]): row[2:] for row in table("String")}


def formats(string: str, scales: str) -> list[TensorFormat]:
    """What the string means with such scales, for each type of model; nothing if refused."""
    try:
        return [resolve_format(string, dtype, SCALES[scales]) for dtype in MODEL_DTYPES]
    except ScaleError:
        return []


def test_no_row_is_there_twice() -> None:
    assert len(ROWS) == len(table("String"))
    assert {string for string, _ in ROWS} == set(KV_CACHE_DTYPES)


@pytest.mark.parametrize("string", KV_CACHE_DTYPES)
@pytest.mark.parametrize("scales", SCALES)
def test_row_of_every_string_and_scale(string: str, scales: str) -> None:
    made = formats(string, scales)
    row = ROWS.get((string, scales))
    if not made or row is None:
        assert not made, "the format exists, but has no row"
        assert row is None, "the row is there, but the format is refused"
        return
    code, static, dynamic, bits_64, bits_128 = row
    expected_code = "the model's dtype" if string == "auto" else made[0].code.name
    assert code == expected_code
    assert static == ("yes" if made[0].static else "no")
    assert dynamic == ("yes" if made[0].dynamic else "no")
    for cell, size in ((bits_64, 64), (bits_128, 128)):
        bits = sorted({each.effective_bits(size) for each in made})
        assert cell == " or ".join(f"{value:g}" for value in bits)


def test_code_types() -> None:
    rows = {row[0]: row[1:] for row in table("Code | Bytes")}
    assert set(rows) == set(CODE_TYPES)
    for name, (num_bytes, largest, clip_at, interleave, tolerance) in rows.items():
        code = CODE_TYPES[name]
        assert int(num_bytes) == code.num_bytes
        assert float(largest.split(" ")[0]) == pytest.approx(code.max_value, rel=1e-7)
        expected = float("inf") if clip_at == "∞" else float(clip_at)
        assert expected == pytest.approx(code.clip_at, rel=1e-7)
        assert int(interleave) == code.interleave
        assert float(tolerance) == code.tolerance


def test_every_code_has_an_error_bound() -> None:
    assert {row[0] for row in table("Code | Largest error")} == set(CODE_TYPES)
