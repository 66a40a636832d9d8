"""The engine in a thread of its own, behind asyncio.

That thread alone touches the engine. The event loop sends it functions through a queue; between
two steps it runs them, and after a step it sends each request what has come to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.outputs import RequestDelta
from tightkv.engine.request import Request
from tightkv.engine.sampling_params import SamplingParams
from tightkv.engine.snapshot import take_snapshot
from tightkv.errors import EngineError, IntegrityError, TightKVError
from tightkv.metrics import EngineSnapshot, RequestStats

__all__ = ["AsyncEngine", "EngineObserver", "IdleWork", "Prompt", "QueueFullError", "RequestStream"]

_logger = logging.getLogger("tightkv")

_T = TypeVar("_T")

_SECONDS_BETWEEN_SNAPSHOTS = 0.5
_FAILED_STEPS_TO_DEATH = 3
_SECONDS_FOR_THE_LAST_STEP = 60


class QueueFullError(TightKVError):
    """As many requests wait as may wait; try again later."""


class EngineObserver(Protocol):
    """Told by the engine's thread, where things happen."""

    def on_tokens(self, stats: RequestStats, count: int, now: float) -> None:
        """Tokens of a request were made; the times in `stats` are still those before."""

    def on_step(self, num_tokens: int) -> None:
        """A step of so many tokens was made."""

    def on_finished(self, request: Request, stats: RequestStats) -> None:
        """A request has ended, however it did."""


class IdleWork(Protocol):
    """What the engine's thread does while no request waits or runs."""

    def on_finished(self, request: Request) -> None:
        """A request has ended."""

    def run_once(self) -> bool:
        """Do a small piece; False: there is nothing more."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and its text where it came as one."""

    token_ids: list[int]
    text: str | None = None


class RequestStream:
    """What comes to one request, for one reader.

    Attributes:
        stats: times and counts; those of the engine's thread.
    """

    def __init__(self, request_id: str, stats: RequestStats) -> None:
        self.request_id = request_id
        self.stats = stats
        self._arrived: asyncio.Queue[RequestDelta] = asyncio.Queue()

    def put(self, delta: RequestDelta) -> None:
        self._arrived.put_nowait(delta)

    async def deltas(self) -> AsyncIterator[RequestDelta]:
        """All that comes, until the request has ended.

        Raises:
            RequestError: if its own parameters left nothing to sample.
            EngineError: if it failed for another reason.
        """
        while True:
            delta = await self._arrived.get()
            if delta.failure is not None:
                raise delta.failure
            yield delta
            if delta.finished:
                return


@dataclass(slots=True)
class _Served:
    """A request in the engine, as its thread knows it."""

    request: Request
    stream: RequestStream


_Command = tuple[int, int, Callable[[], Any], Future[Any]]
"""Its order, its number, what to run, and where the result goes."""


class _Commands:
    """Functions for the engine's thread, which waits here when it has nothing to do."""

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[_Command] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._error: str | None = None

    def put(self, function: Callable[[], _T], order: int = 0) -> Future[_T]:
        """Send a function; its result or exception comes through the future.

        Args:
            function: what to run.
            order: of those that wait for the end of a step the lowest runs first.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._error is not None:
                future.set_exception(EngineError(self._error))
            else:
                self._queue.put((order, next(self._numbers), function, future))
        return future

    def run_all(self, wait: bool) -> None:
        """Run what was sent.

        Args:
            wait: whether to wait for something if there is nothing.
        """
        while (command := self._take(wait)) is not None:
            _, _, function, future = command
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # a library in Rust panics with one
                future.set_exception(error)

    def close(self, error: str) -> None:
        """Refuse what was sent and what is sent from now on: nobody waits in vain."""
        with self._lock:
            self._error = error
        while (command := self._take(wait=False)) is not None:
            _, _, _, future = command
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(error))

    def _take(self, wait: bool) -> _Command | None:
        try:
            return self._queue.get(block=wait)
        except queue.Empty:
            return None


class AsyncEngine:
    """Requests in, streams out, for any number of tasks of one event loop.

    Attributes:
        error: why the engine does not run any more; None while it does.
        max_unfinished: most completions that may wait or run.
        observer: told of tokens, steps and ends; set before the start, as the next two are.
        idle_work: done while the engine is idle.
        on_death: called in the event loop if the engine dies.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        max_queue_len: int = 1024,
    ) -> None:
        """Take over an engine; nobody else may use it from now on.

        Args:
            engine: loaded and idle.
            max_queue_len: completions that may wait besides those that can run at once.
        """
        self.error: str | None = None
        self.observer: EngineObserver | None = None
        self.idle_work: IdleWork | None = None
        self.on_death: Callable[[], None] | None = None
        self._engine = engine
        self.max_unfinished = engine.config.scheduler.max_num_seqs + max_queue_len
        self._commands = _Commands()
        self._served: dict[str, _Served] = {}
        self._streams: dict[str, RequestStream] = {}
        self._snapshot = take_snapshot(engine)
        self._snapshot_time = time.monotonic()
        self._num_failed_steps = 0
        self._stops = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="tightkv-engine", daemon=True)

    @property
    def is_healthy(self) -> bool:
        return self.error is None and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""
        return len(self._streams)

    def arrival_times(self) -> dict[str, float]:
        """When each unfinished request came, in seconds of `time.monotonic()`."""
        return {name: stream.stats.arrival_time for name, stream in self._streams.items()}

    def latest_snapshot(self) -> EngineSnapshot:
        """The engine as it was at most about half a second, or one step, ago."""
        return self._snapshot

    def start(self) -> None:
        """Begin to serve; call it in the event loop that will make the requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End all requests and the thread."""
        if self._thread.is_alive():
            self._commands.put(self._set_stop)
            await asyncio.to_thread(self._thread.join, _SECONDS_FOR_THE_LAST_STEP)

    async def call(self, function: Callable[[LLMEngine], _T], order: int = 0) -> _T:
        """Run a function of the engine in its thread, between two steps.

        Args:
            function: what to run.
            order: of those that come during one step the lowest runs first.

        Raises:
            EngineError: if the engine has died; and whatever the function raises.
        """
        command = self._commands.put(lambda: function(self._engine), order)
        return await asyncio.wrap_future(command)

    async def submit(
        self,
        request_id: str,
        prompts: Seq[Prompt],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> list[RequestStream]:
        """Queue a request for each prompt; they are in the engine when this returns.

        Args:
            request_id: a name that no other has; with several prompts they are numbered.
            prompts: all or none of which are queued.
            params: how to answer.
            cache_salt: as in `LLMEngine.add_request`.
            priority: likewise.

        Raises:
            RequestError: if one of them can never be served.
            QueueFullError: if too many wait.
            EngineError: if the engine has died.
        """
        unfinished = sum(stream.stats.n for stream in self._streams.values())
        if unfinished + params.n * len(prompts) > self.max_unfinished:
            raise QueueFullError(
                f"{unfinished} completions are waiting or running, and {self.max_unfinished} may: "
                "try again later."
            )
        streams = [
            RequestStream(
                request_id if len(prompts) == 1 else f"{request_id}-{index}",
                RequestStats(
                    arrival_time=time.monotonic(),
                    num_prompt_tokens=len(prompt.token_ids),
                    n=params.n,
                    max_tokens=params.max_tokens,
                ),
            )
            for index, prompt in enumerate(prompts)
        ]
        self._streams |= {stream.request_id: stream for stream in streams}
        try:
            # Of a crowd that comes at once the shortest begins: fewer wait for the longest. Nobody
            # waits for those that come later.
            await self.call(
                lambda engine: self._add(engine, streams, prompts, params, cache_salt, priority),
                order=sum(len(prompt.token_ids) for prompt in prompts),
            )
        except BaseException:
            # Also when the client has gone while the requests were on their way in.
            for stream in streams:
                self.abort(stream.request_id)
            raise
        return streams

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; a finished one is left alone."""
        if self._streams.pop(request_id, None) is not None:
            self._commands.put(lambda: self._abort(request_id)).add_done_callback(_log_failure)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stops:
                self._commands.run_all(wait=not self._has_work())
                if self._engine.has_unfinished_requests:
                    self._step()
            self._look()
            self.error = "The engine has been stopped."
        except BaseException as error:  # a library in Rust panics with one
            _logger.exception("the engine has died")
            self.error = f"The engine has died ({type(error).__name__}): restart the server."
            self._tell(self.on_death)
        self._commands.close(self.error)
        self._end_all(self.error)

    def _has_work(self) -> bool:
        if self._engine.has_unfinished_requests:
            return True
        has_more = self.idle_work is not None and self.idle_work.run_once()
        if not has_more or self._is_time_to_look(time.monotonic()):
            self._look()
        return has_more

    def _set_stop(self) -> None:
        self._stops = True

    def _add(
        self,
        engine: LLMEngine,
        streams: Seq[RequestStream],
        prompts: Seq[Prompt],
        params: SamplingParams,
        cache_salt: str,
        priority: int,
    ) -> None:
        for stream, prompt in zip(streams, prompts, strict=True):
            request = engine.add_request(
                stream.request_id, prompt.token_ids, params, prompt.text, cache_salt, priority
            )
            self._served[stream.request_id] = _Served(request, stream)

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request(request_id)
        served = self._served.get(request_id)
        if served is not None:
            self._finish(served, time.monotonic())

    def _step(self) -> None:
        begin = time.monotonic()
        stats = self._engine.stats
        before = stats.prompt_tokens + stats.generation_tokens
        try:
            touched = self._engine.step()
            self._num_failed_steps = 0
        except IntegrityError:
            raise
        except EngineError as error:
            _logger.error("%s", error)
            self._num_failed_steps += 1
            if self._num_failed_steps >= _FAILED_STEPS_TO_DEATH:
                raise
            served = [each.request for each in self._served.values()]
            touched = [request for request in served if request.is_finished]
        now = time.monotonic()
        self._deliver(touched, begin, now)
        num_tokens = stats.prompt_tokens + stats.generation_tokens - before
        if self._is_time_to_look(now):
            self._look()
        if self.observer is not None:
            self._inform(self.observer.on_step, num_tokens)

    def _deliver(self, touched: Seq[Request], begin: float, now: float) -> None:
        """Note times and send each request what has come to it, all in one call of the loop."""
        deltas: list[tuple[RequestStream, RequestDelta]] = []
        for request in touched:
            served = self._served[request.request_id]
            self._note(served, begin, now)
            delta = request.take_delta()
            if delta.completions or delta.finished or delta.prompt_logprobs is not None:
                deltas.append((served.stream, delta))
            if request.is_finished:
                self._finish(served, now)
        if deltas:
            self._tell(lambda: self._put(deltas))

    def _note(self, served: _Served, begin: float, now: float) -> None:
        request, stats = served.request, served.stream.stats
        if stats.scheduled_time is None:
            stats.scheduled_time = begin
        made = sum(sequence.num_output_tokens for sequence in request.sequences)
        count = made - stats.num_generation_tokens
        stats.num_cached_tokens = request.sequences[0].num_cached_tokens or 0
        if count == 0:
            return
        if self.observer is not None:
            self._inform(self.observer.on_tokens, stats, count, now)
        stats.num_generation_tokens = made
        stats.last_token_time = now
        if stats.first_token_time is None:
            stats.first_token_time = now

    def _finish(self, served: _Served, now: float) -> None:
        request, stats = served.request, served.stream.stats
        del self._served[request.request_id]
        stats.finished_time = now
        stats.num_preemptions = sum(sequence.num_preemptions for sequence in request.sequences)
        reasons = [sequence.finish_reason or "abort" for sequence in request.sequences]
        stats.finished_reason = next((r for r in reasons if r in ("error", "abort")), reasons[0])
        if self.observer is not None:
            self._inform(self.observer.on_finished, request, stats)
        if self.idle_work is not None:
            self._inform(self.idle_work.on_finished, request)

    def _end_all(self, reason: str) -> None:
        left = list(self._served.values())
        ended = RequestDelta(completions=(), finished=True, failure=EngineError(reason))
        self._tell(partial(self._put, [(served.stream, ended) for served in left]))
        for served in left:
            self._abort(served.request.request_id)

    def _inform(self, listener: Callable[..., None], *facts: Any) -> None:
        """Tell who only looks on: what goes wrong there ends no request."""
        try:
            listener(*facts)
        except Exception:
            _logger.exception("%s failed", listener.__qualname__)

    def _is_time_to_look(self, now: float) -> bool:
        return now - self._snapshot_time > _SECONDS_BETWEEN_SNAPSHOTS

    def _look(self) -> None:
        self._snapshot = take_snapshot(self._engine)
        self._snapshot_time = time.monotonic()

    def _tell(self, function: Callable[[], None] | None) -> None:
        """Run a function in the event loop, unless that is closed."""
        if function is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    # What follows runs in the event loop.

    def _put(self, deltas: Seq[tuple[RequestStream, RequestDelta]]) -> None:
        for stream, delta in deltas:
            stream.put(delta)
            if delta.finished:
                self._streams.pop(stream.request_id, None)


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    # An engine that has ended has ended its requests, too.
    if error is not None and not isinstance(error, EngineError):
        _logger.error("a request could not be aborted", exc_info=error)
