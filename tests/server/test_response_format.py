from __future__ import annotations

from typing import Any

import pytest

from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import RequestError
from tightkv.server.response_format import response_form

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_any_text() -> None:
    assert response_form(None) is None
    assert response_form({"type": "text"}) is None


def test_any_object() -> None:
    assert response_form({"type": "json_object"}) == StructuredOutputs(json_object=True)


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_that_is_not_strict_may_be_followed_in_part(strict: bool | None) -> None:
    form = response_form(
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": strict}}
    )
    lenient = {} if strict else {"x-guidance": {"lenient": True}}
    assert form == StructuredOutputs(json={**SCHEMA, **lenient})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"type": "xml"},
        {"type": ["text"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": "{}"}},
    ],
    ids=str,
)
def test_what_is_malformed_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^response_format"):
        response_form(given)
