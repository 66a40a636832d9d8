"""What every route needs: the engine, the names of the model, and the way of a request to it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from tightkv.config import ServerConfig
from tightkv.engine.grammar import GrammarCompiler
from tightkv.engine.outputs import RequestDelta
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import InvalidSamplingParamsError, PromptTooLongError, RequestError
from tightkv.models import LoadedModel, render_chat
from tightkv.server.async_engine import AsyncEngine, Prompt, RequestStream
from tightkv.server.errors import ModelNotFoundError
from tightkv.server.sampling_defaults import SamplingDefaults

__all__ = ["ClientGoneError", "Prompt", "Serving", "merged", "new_id", "unless_gone"]

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class Serving:
    """One model, served under its names."""

    engine: AsyncEngine
    model: LoadedModel
    names: tuple[str, ...]
    max_model_len: int
    grammars: GrammarCompiler
    config: ServerConfig
    created: int
    sampling_defaults: SamplingDefaults = field(default_factory=dict)
    # A tokenizer may not be used by two threads at once: the engine's thread has the model's own.
    _tokenizer: PreTrainedTokenizerBase = field(init=False)
    _thread: ThreadPoolExecutor = field(init=False)
    # A schema may take long, and must not hold up everybody's tokenizing.
    _grammar_thread: ThreadPoolExecutor = field(init=False)
    _longest_token: int = field(init=False)  # in characters

    def __post_init__(self) -> None:
        self._tokenizer = copy.deepcopy(self.model.tokenizer)
        self._thread = ThreadPoolExecutor(1, "tightkv-tokenizer")
        self._grammar_thread = ThreadPoolExecutor(1, "tightkv-grammars")
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    @property
    def chat_template(self) -> str | None:
        template = self.model.tokenizer.chat_template
        return template if isinstance(template, str) or template is None else str(template)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for a name that is not served."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"There is no model {name[:200]!r}: {', '.join(self.names)} is served."
            )

    def check_logprobs(self, name: str, number: int | None) -> None:
        """Raise InvalidSamplingParamsError for more than may be asked for."""
        if number is not None and not 0 <= number <= self.config.max_logprobs:
            raise InvalidSamplingParamsError(
                f"{name} must be from 0 to {self.config.max_logprobs} (--max-logprobs), got "
                f"{number}."
            )

    def check_num_prompts(self, number: int) -> None:
        """Raise RequestError for more completions than may ever wait, before any is tokenized."""
        if number > self.engine.max_unfinished:
            raise RequestError(
                f"Prompts times n is {number}, and {self.engine.max_unfinished} completions may "
                "wait or run at once: send fewer prompts, or lower n."
            )

    def check_length(self, text: str) -> None:
        """Raise PromptTooLongError for a text that can only be too long, before it is tokenized."""
        if len(text) > self.max_model_len * self._longest_token:
            raise PromptTooLongError(
                f"The prompt has {len(text)} characters, which are more than the "
                f"{self.max_model_len} tokens that prompt and answer together may have: shorten it."
            )

    def check_room(self, prompt: Prompt, max_tokens: int | None) -> None:
        """Raise PromptTooLongError if an answer of this length cannot follow."""
        asked = len(prompt.token_ids) + (max_tokens or 0)
        if max_tokens is not None and asked > self.max_model_len:
            raise PromptTooLongError(
                f"The prompt has {len(prompt.token_ids)} tokens and max_tokens is {max_tokens}, "
                f"but both together may be {self.max_model_len}: shorten the prompt, or lower "
                "max_tokens."
            )

    async def compile_grammar(self, params: SamplingParams) -> None:
        """Make the form of the answer ready here, so that the engine's thread does not wait for it.

        Raises:
            InvalidSamplingParamsError: for a form that cannot be followed.
        """
        if params.structured_outputs is not None:
            await asyncio.get_running_loop().run_in_executor(
                self._grammar_thread, self.grammars.compile, params.structured_outputs
            )

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """A text as a prompt, of any length.

        Raises:
            RequestError: if it is no text (a lone half of a surrogate pair).
        """
        return await self._in_thread(self._tokenize, text, add_special_tokens)

    async def render_chat(
        self, messages: Sequence[dict[str, Any]], add_special_tokens: bool, /, **arguments: Any
    ) -> Prompt:
        """A conversation as a prompt; errors as in `models.render_chat`."""

        def render() -> Prompt:
            text = render_chat(self.model, messages, **arguments)
            self.check_length(text)
            return self._tokenize(text, add_special_tokens)

        return await self._in_thread(render)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special ones included."""
        self.check_token_ids(token_ids)
        return str(await self._in_thread(self._tokenizer.decode, list(token_ids)))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        strings = await self._in_thread(self._tokenizer.convert_ids_to_tokens, list(token_ids))
        return list(strings)

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise RequestError for an id that the model does not have."""
        for token_id in token_ids:
            if not 0 <= token_id < self.model.vocab_size:
                raise RequestError(
                    f"There is no token {token_id}: ids go from 0 to {self.model.vocab_size - 1}."
                )

    @contextlib.asynccontextmanager
    async def submitted(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        cache_salt: str,
        priority: int,
    ) -> AsyncIterator[list[RequestStream]]:
        """Streams of these prompts; whatever happens inside, none is left running after it."""
        streams = await self.engine.submit(
            request_id, prompts, params, cache_salt=cache_salt, priority=priority
        )
        try:
            yield streams
        finally:
            for stream in streams:
                self.engine.abort(stream.request_id)

    def close(self) -> None:
        for thread in (self._thread, self._grammar_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    def _tokenize(self, text: str, add_special_tokens: bool) -> Prompt:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text has half a surrogate pair at character {error.start}: send Unicode."
            ) from error
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return Prompt(ids, text)

    async def _in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestDelta]]:
    """Index of the stream and what came to it, as it comes.

    Raises:
        EngineError: as soon as one of them ends with an error.
    """
    if len(streams) == 1:
        async for delta in streams[0].deltas():
            yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for delta in stream.deltas():
                arrived.put_nowait((index, delta))
            arrived.put_nowait((index, None))
        except Exception as error:
            arrived.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(*each)) for each in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await arrived.get()
            if isinstance(item, RequestDelta):
                yield index, item
            elif item is None:
                num_open -= 1
            else:
                raise item
    finally:
        for task in pumps:
            task.cancel()


async def unless_gone(http: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGoneError: if it has gone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def new_id(prefix: str, http: Request) -> str:
    """A name that no other request has; the HTTP request's id, which its client knows, is in it."""
    return f"{prefix}-{http.state.http_request_id}-{uuid.uuid4().hex[:8]}"
