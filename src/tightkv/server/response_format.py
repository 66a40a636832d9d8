"""`response_format` of OpenAI's API, as the engine's structured outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import RequestError

__all__ = ["response_form", "unless_strict"]


def response_form(response_format: Mapping[str, Any] | None) -> StructuredOutputs | None:
    """The form that a `response_format` asks for; None if any text will do.

    Raises:
        RequestError: if it is malformed, or of a type that is not served.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise RequestError(
            "response_format's type must be 'text', 'json_object' or 'json_schema', "
            f"got {str(kind)[:60]!r}."
        )
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(schema, Mapping):
        raise RequestError(
            "response_format of type 'json_schema' needs json_schema.schema, an object, got "
            f"{str(given)[:60]!r}."
        )
    return StructuredOutputs(json=unless_strict(schema, given.get("strict")))


def unless_strict(schema: Mapping[str, object], strict: object) -> Mapping[str, object]:
    """A schema of which keywords that are not served are passed over, unless it is strict.

    So OpenAI has it: a strict schema is followed to the letter or refused.
    """
    if strict:
        return schema
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {"lenient": True, **(own if isinstance(own, Mapping) else {})}}
