"""What a request leaves open is taken from the model's own recommendation, as in vLLM."""

from __future__ import annotations

import logging

from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import ConfigError, InvalidSamplingParamsError
from tightkv.models import LoadedModel

__all__ = ["SamplingDefaults", "sampling_defaults"]

_logger = logging.getLogger("tightkv")

SamplingDefaults = dict[str, float]
"""Values by the names of `SamplingParams`; what is missing has OpenAI's default."""

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: LoadedModel, source: str) -> SamplingDefaults:
    """Defaults of requests.

    Args:
        model: that is served.
        source: "auto" for what the model's generation_config.json sets, "vllm" for OpenAI's.

    Raises:
        ConfigError: if the file holds a value that no request may have.
    """
    config = model.model.generation_config
    if source == "vllm" or config is None:
        return {}
    # Only what the file sets: transformers has defaults of its own.
    given = config.to_diff_dict()
    defaults = {name: given[name] for name in _NAMES if given.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidSamplingParamsError as error:
        raise ConfigError(
            f"The model's generation_config.json cannot be followed: {error} Correct it, or give "
            "--generation-config vllm."
        ) from error
    if defaults:
        _logger.info(
            "Sampling defaults of the model's generation_config.json: %s "
            "(--generation-config vllm leaves them out)",
            ", ".join(f"{name} {value:g}" for name, value in defaults.items()),
        )
    return defaults
