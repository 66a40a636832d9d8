"""Offline use: `LLM(model, kv_cache_dtype="int8").generate(prompts)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any

from tightkv.calibration import calibrate_at_start
from tightkv.config import EngineConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.outputs import RequestOutput
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.models import LoadedModel, render_chat

__all__ = ["LLM"]

Prompt = str | Seq[int]
Message = Mapping[str, Any]
ProgressCallback = Callable[[RequestOutput], None]


class LLM:
    """A model and its cache, for batches of prompts.

    Example:
        >>> llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", kv_cache_dtype="int8")
        >>> llm.generate("The capital of France is")[0].outputs[0].text
    """

    def __init__(self, model: str | LoadedModel, **options: Any) -> None:
        """Load and allocate.

        Args:
            model: Hugging Face folder or hub id, GGUF file, or the model of another `LLM`.
            options: fields of `tightkv.config`, as `kv_cache_dtype` or `max_model_len`.

        Raises:
            ConfigError: for an unknown option, or options that contradict.
            CheckpointError: if the model cannot be read.
        """
        loaded = model if isinstance(model, LoadedModel) else None
        name = model.name if isinstance(model, LoadedModel) else model
        config = EngineConfig.from_options({"model": name, **options})
        config, loaded = calibrate_at_start(config, loaded)
        self.engine = LLMEngine(config, model=loaded)
        self._ids = itertools.count()

    @property
    def model(self) -> LoadedModel:
        """The loaded model, which another `LLM` may share."""
        return self.engine.model

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        on_finished: ProgressCallback | None = None,
        priority: Seq[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts.

        Args:
            prompts: a text or token ids, or a list of such.
            sampling_params: for all, or one per prompt; default: `SamplingParams()`.
            on_finished: called with each request's output as soon as it is finished.
            priority: of each prompt, the lower the earlier; with `scheduling_policy="priority"`.

        Returns:
            One output per prompt, in their order. A request that failed while it ran has
            `finish_reason` "error" and says why in `error`.

        Raises:
            RequestError: if a prompt or its parameters can never be served; none is then run.
        """
        batch = _as_batch(prompts)
        params = _one_each(sampling_params, len(batch))
        if priority is not None and len(priority) != len(batch):
            raise RequestError(
                f"There are {len(batch)} prompts and {len(priority)} priorities: give one for each."
            )
        return self._run(batch, params, [None] * len(batch), on_finished, priority)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        on_finished: ProgressCallback | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of `{"role": ..., "content": ...}`.

        Args:
            messages: one conversation or a list of them.
            sampling_params: as for `generate`.
            on_finished: as for `generate`.
            template_arguments: further variables of the chat template.

        Raises:
            RequestError: if the model has no chat template, or a prompt can never be served.
        """
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        texts = [self.render_chat(chat, **template_arguments) for chat in chats]
        ids = [self.engine.tokenize(text, add_special_tokens=False) for text in texts]
        return self._run(ids, _one_each(sampling_params, len(ids)), texts, on_finished)

    def render_chat(self, messages: Any, **template_arguments: Any) -> str:
        """A conversation as the text that the model is asked to continue."""
        return render_chat(self.model, messages, add_generation_prompt=True, **template_arguments)

    def _run(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        texts: Seq[str | None],
        on_finished: ProgressCallback | None,
        priorities: Seq[int] | None = None,
    ) -> list[RequestOutput]:
        requests = []
        priorities = priorities or [0] * len(prompts)
        try:
            for prompt, param, text, priority in zip(
                prompts, params, texts, priorities, strict=True
            ):
                request_id = f"offline-{next(self._ids)}"
                requests.append(
                    self.engine.add_request(request_id, prompt, param, text, priority=priority)
                )
            while self.engine.has_unfinished_requests:
                for request in self.engine.step():
                    if request.is_finished and on_finished is not None:
                        on_finished(request.output())
        except BaseException:
            # A refused prompt or Ctrl-C leaves nothing behind in the engine.
            for request in requests:
                self.engine.abort_request(request.request_id)
            raise
        return [request.output() for request in requests]


def _as_batch(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(
    params: SamplingParams | Seq[SamplingParams] | None, count: int
) -> Seq[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"There are {count} prompts and {len(params)} sampling_params: give one for all, or "
            "one for each."
        )
    return params
