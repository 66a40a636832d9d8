"""Calibration text that the model writes itself, where there is no data set.

Sampled at temperature 1 from the model's first token, as LLM-QAT does for its training data
(arXiv:2305.17888).
"""

from __future__ import annotations

import hashlib
from array import array

from tightkv.calibration.data import CalibrationText, check_window, split_windows
from tightkv.calibration.progress import Progress
from tightkv.config import EngineConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.sampling_params import SamplingParams
from tightkv.models import LoadedModel

__all__ = ["write_text"]

_MAX_NUM_SEQS = 16


def write_text(
    model: LoadedModel, num_samples: int, max_seq_len: int, seed: int, progress: Progress
) -> CalibrationText:
    """Sample `num_samples` texts of `max_seq_len` tokens; the last quarter is held out."""
    check_window(model, num_samples, max_seq_len)
    engine = LLMEngine(
        EngineConfig.from_options(
            {
                "model": model.name,
                "max_model_len": max_seq_len,
                "max_num_seqs": _MAX_NUM_SEQS,
                "enable_prefix_caching": False,
            }
        ),
        model=model,
    )
    start = _first_token(model)
    for index in range(num_samples):
        params = SamplingParams(
            temperature=1.0,
            seed=seed * 1_000_003 + index,
            max_tokens=max_seq_len - 1,
            ignore_eos=True,
            detokenize=False,
        )
        engine.add_request(str(index), [start], params)
    texts: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        for request in engine.step():
            if request.is_finished:
                answer = request.output().outputs[0].token_ids
                texts[request.request_id] = [start, *answer]
                progress("writing text", len(texts), num_samples)
    tokens = [token for index in range(num_samples) for token in texts[str(index)]]
    digest = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
    return split_windows(tokens, model, max_seq_len, ("self",), digest)


def _first_token(model: LoadedModel) -> int:
    """What the model knows as a beginning; else an end, after which something new begins."""
    first = model.tokenizer.bos_token_id
    if first is not None:
        return int(first)
    return min(model.eos_token_ids, default=0)
