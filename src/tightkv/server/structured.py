"""The form that a request wants its answer to have."""

from __future__ import annotations

from dataclasses import fields

from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import RequestError
from tightkv.server.protocol import SamplingRequest
from tightkv.server.response_format import response_form

__all__ = ["structured_outputs"]


def structured_outputs(body: SamplingRequest) -> StructuredOutputs | None:
    """From OpenAI's `response_format`, or vLLM's `structured_outputs`.

    Raises:
        RequestError: if it is malformed, or both are given.
    """
    form = response_form(body.response_format)
    given = body.structured_outputs
    if given is None:
        return form
    if form is not None:
        raise RequestError("There are response_format and structured_outputs: give one of them.")
    known = {field.name for field in fields(StructuredOutputs)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(
            f"structured_outputs has {unknown[0][:60]!r}: known are {', '.join(sorted(known))}."
        )
    return StructuredOutputs(**given)
