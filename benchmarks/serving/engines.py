"""Engines as processes: a work is run by the driver of an engine, in that engine's interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.serving.driver import FIRST_TOKEN, Result, progress

__all__ = [
    "Arm",
    "Engine",
    "EngineFailure",
    "Outcome",
    "best",
    "end_session",
    "last_words",
    "take_turns",
]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 3600


class EngineFailure(Exception):
    """An engine that is not there, or did not do its work; the message is one sentence."""


@dataclass(frozen=True)
class Engine:
    """An engine, and how its driver is started.

    Attributes:
        name: as it is shown.
        module: its driver.
        python: its interpreter; None if the user gave none.
        variable: the environment variable that gives the interpreter.
        model: the model in the form that the engine reads.
        environment: variables that the engine wants.
    """

    name: str
    module: str
    python: str | None = sys.executable
    variable: str = ""
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, work: str, **options: Any) -> Result:
        """Do a work in a new process.

        Args:
            work: what the driver calls it.
            options: flags of the driver; a list gives a flag several values.

        Returns:
            What the driver found, the machine's load in the last minute and, if the driver
            reported its first token, after how many seconds.

        Raises:
            EngineFailure: if there is no such engine, or it failed.
        """
        if self.python is None:
            raise EngineFailure(f"not given: set {self.variable}")
        command = [self.python, "-m", f"benchmarks.serving.{self.module}", work]
        for name, value in {"model": self.model, **options}.items():
            values = value if isinstance(value, list | tuple) else [value]
            command += [f"--{name.replace('_', '-')}", *map(str, values)]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            return self._watch(command, errors)

    def _watch(self, command: list[str], errors: IO[str]) -> Result:
        start = time.perf_counter()
        try:
            # A session of its own, so that nothing the engine has started outlives it.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                cwd=ROOT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailure(f"cannot be started: {self.python}: {error.strerror}") from error
        timer = threading.Timer(TIMEOUT_SECONDS, end_session, [process.pid])
        timer.start()
        found: Result = {}
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == FIRST_TOKEN:
                    found["first_token_seconds"] = time.perf_counter() - start
                elif line.startswith("{"):
                    with contextlib.suppress(json.JSONDecodeError):
                        found.update(json.loads(line))
            status = process.wait()
        finally:
            timer.cancel()
            end_session(process.pid)
        if status or "version" not in found:
            raise EngineFailure(f"failed with status {status}: {last_words(errors)}")
        # Above the engine's own threads it tells that something else was running.
        return {**found, "load_average": round(os.getloadavg()[0], 2)}


@dataclass(frozen=True)
class Arm:
    """An engine with options, as one of those that are compared."""

    name: str
    engine: Engine
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What an arm found in its rounds, or why it did not."""

    arm: Arm
    results: list[Result] = field(default_factory=list)
    failure: str = ""

    def median(self, figure: Callable[[Result], float]) -> float | None:
        """Median of a figure over the rounds; None after a failure."""
        if self.failure or not self.results:
            return None
        return statistics.median(map(figure, self.results))


def take_turns(
    title: str, work: str, arms: Sequence[Arm], rounds: int, **options: Any
) -> dict[str, Outcome]:
    """Run a work in all arms, one after another, for some rounds.

    So a busy moment of the machine hits all of them. An arm that has failed is not tried again.
    """
    outcomes = {arm.name: Outcome(arm) for arm in arms}
    for number in range(rounds):
        for outcome in outcomes.values():
            if outcome.failure:
                continue
            arm = outcome.arm
            if arm.engine.python is not None:
                progress(f"{title}, round {number + 1} of {rounds}: {arm.name}")
            try:
                outcome.results.append(arm.engine.run(work, **{**options, **arm.options}))
            except EngineFailure as failure:
                outcome.failure = str(failure)
    return outcomes


def best(
    outcomes: Sequence[Outcome], figure: Callable[[Result], float], choose: Callable[..., Any] = max
) -> Outcome:
    """The outcome with the best median, or the first if all have failed."""
    usable = [outcome for outcome in outcomes if outcome.median(figure) is not None]
    if not usable:
        return outcomes[0]
    chosen: Outcome = choose(usable, key=lambda outcome: outcome.median(figure))
    return chosen


def end_session(process_id: int) -> None:
    """End a process that leads a session, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_id, signal.SIGKILL)


def last_words(errors: IO[str]) -> str:
    """The last exception in what a process wrote, or else its last line."""
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b", line)]
    words = (named or lines or ["it said nothing"])[-1]
    return words if len(words) <= 200 else f"{words[:200]} …"
