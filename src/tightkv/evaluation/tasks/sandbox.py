"""Programs that a model wrote, run where they can do little harm.

Each runs in a process of its own (`python -I -S`) with an empty environment, an empty folder to
work in, no input, limits of CPU time, memory, files and processes, and an audit hook that refuses
what a function does not need: changes of files, processes, sockets, foreign functions. Where the
machine allows it, the process also has no network and no view of other processes (Linux
namespaces), and runs as the user nobody if TightKV runs as root. This holds back mistakes and
carelessness of a model, not an attacker who knows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tightkv.errors import EngineError

__all__ = ["ProgramLimits", "run_program"]

_logger = logging.getLogger(__name__)

_DRIVER = Path(__file__).with_name("sandbox_driver.py")
_NAMESPACES = ("--user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What a program may take.

    Attributes:
        wall_seconds: for programs that wait; long, so that a busy machine changes no score.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class _Isolation:
    """How a process is started: what stands before its command, and its user."""

    command: tuple[str, ...] = ()
    user: int | None = None


def run_program(program: str, limits: ProgramLimits | None = None) -> bool:
    """Whether a Python program comes to its end by itself and without an error.

    Raises:
        EngineError: if not even an empty program does, or no process can be started.
    """
    try:
        return _run(program, limits or ProgramLimits(), _isolation())
    except OSError as error:
        raise EngineError(
            f"A process for a program of humaneval cannot be started ({error.strerror}): make "
            "room for it, and run the same command again."
        ) from error


@lru_cache(maxsize=1)
def _isolation() -> _Isolation:
    """The strictest under which an empty program runs."""
    unshare = shutil.which("unshare")
    commands = [(unshare, *_NAMESPACES), ()] if unshare else [()]
    users = [_NOBODY, None] if os.geteuid() == 0 else [None]
    for command in commands:
        for user in users:
            isolation = _Isolation(command, user)
            if _works(isolation):
                if not command:
                    _logger.warning(
                        "This machine has no namespaces for us (unshare): programs that the model "
                        "writes are kept from the network by Python's audit hook alone."
                    )
                return isolation
    raise EngineError(
        "Not even an empty Python program runs under the sandbox's limits on this machine: leave "
        "humaneval out."
    )


def _works(isolation: _Isolation) -> bool:
    with contextlib.suppress(OSError):  # nobody may not read this Python, say
        return _run("pass", ProgramLimits(), isolation)
    return False


def _run(program: str, limits: ProgramLimits, isolation: _Isolation) -> bool:
    token = secrets.token_hex(16).encode()
    arguments = (str(limits.cpu_seconds), str(limits.memory_bytes))
    command = (*isolation.command, sys.executable, "-I", "-S", "-c", _DRIVER.read_text())
    with tempfile.TemporaryDirectory(prefix="tightkv-") as folder:
        process = subprocess.Popen(
            (*command, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            user=isolation.user,
            group=isolation.user,
            extra_groups=None if isolation.user is None else (),
            start_new_session=True,
        )
        try:
            text = token + b"\n" + program.encode("utf-8", "replace")
            output, _ = process.communicate(text, timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == 0 and output == token


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
