"""From configurations to a server that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import uvicorn

from tightkv.calibration import calibrate_at_start
from tightkv.config import EngineConfig, ServerConfig
from tightkv.engine.devices import resolve_device
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.resolve import check_config
from tightkv.errors import ConfigError
from tightkv.models import load_model
from tightkv.server.app import make_app
from tightkv.server.async_engine import AsyncEngine
from tightkv.server.monitor import Monitor
from tightkv.server.quality_watch import QualityWatch, bytes_needed
from tightkv.server.sampling_defaults import sampling_defaults
from tightkv.server.serving import Serving

__all__ = ["load_serving", "run_server"]

_logger = logging.getLogger("tightkv")

_SECONDS_TO_TELL_OF_DEATH = 2.0
_BACKLOG = 2048
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked_to_stop = threading.Event()


def run_server(config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        Exit status: 0, or 1 if the engine has died.

    Raises:
        ConfigError: for settings that cannot be served, and for an address that is taken, before
            weights load.
        CheckpointError, ScaleError: as the engine raises them.
    """
    _check(server_config)
    for number in _SIGNALS:
        signal.signal(number, _quit)
    with _bind(server_config) as listener:
        serving, monitor = load_serving(config, server_config)
        # uvicorn takes the signals from here on, and raises them again when it has stopped.
        for number in _SIGNALS:
            signal.signal(number, _note_signal)
        return asyncio.run(_serve(serving, monitor, listener))


async def _serve(serving: Serving, monitor: Monitor, listener: socket.socket) -> int:
    config = serving.config
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(serving, monitor),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
    )
    died = False

    def on_death() -> None:
        nonlocal died
        died = True
        loop = asyncio.get_running_loop()
        loop.call_later(_SECONDS_TO_TELL_OF_DEATH, setattr, server, "should_exit", True)

    serving.engine.on_death = on_death
    listener.listen(_BACKLOG)  # so that who reads the next line can connect
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    _logger.info("Serving %s at %s://%s:%d", serving.name, scheme, host, port)
    if not _asked_to_stop.is_set():
        await server.serve(sockets=[listener])
    _logger.info("Stopped after %s", monitor.totals())
    return 1 if died else 0


def load_serving(config: EngineConfig, server_config: ServerConfig) -> tuple[Serving, Monitor]:
    """The model, its engine and what watches it, ready for `make_app`."""
    config, model = calibrate_at_start(config, None)
    rate, reserved_bytes = server_config.kv_quality_sample_rate, 0
    if rate:
        check_config(config)
        model = model or load_model(config.model, resolve_device(config.device))
        reserved_bytes = bytes_needed(config, model)
    engine = LLMEngine(config, model=model, reserved_bytes=reserved_bytes)
    names = server_config.served_model_name or (engine.model.name,)
    serving = Serving(
        engine=AsyncEngine(engine, max_queue_len=server_config.max_queue_len),
        model=engine.model,
        names=names,
        max_model_len=engine.plan.max_model_len,
        grammars=engine.grammars,
        config=server_config,
        created=int(time.time()),
        sampling_defaults=sampling_defaults(engine.model, server_config.generation_config),
    )
    monitor = Monitor(
        engine, names[0], serving.engine.latest_snapshot, server_config.enable_log_requests
    )
    serving.engine.observer = monitor
    if rate:
        monitor.quality = QualityWatch(config, engine, monitor.metrics, sample_rate=rate)
        serving.engine.idle_work = monitor.quality
    return serving, monitor


def _check(config: ServerConfig) -> None:
    """Refuse what cannot be served, before anything is loaded."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port is {config.port}: it must be from 0 to 65535.")
    if not 0 <= config.kv_quality_sample_rate <= 1:
        raise ConfigError(
            f"kv_quality_sample_rate is {config.kv_quality_sample_rate:g}: it must be from 0 to 1."
        )
    least = {
        "max_queue_len": (config.max_queue_len, 0),
        "max_request_bytes": (config.max_request_bytes, 1),
        "max_logprobs": (config.max_logprobs, 0),
        "shutdown_timeout": (config.shutdown_timeout, 0),
    }
    for name, (value, limit) in least.items():
        if not limit <= value < math.inf:
            raise ConfigError(f"{name} is {value:g}: it must be a number of at least {limit}.")
    if any(not key or not key.isascii() for key in config.api_key):
        raise ConfigError("An api_key is empty or not ASCII: give keys, or leave --api-key out.")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        raise ConfigError("ssl_certfile and ssl_keyfile go together: give both or neither.")
    for path in filter(None, (config.ssl_certfile, config.ssl_keyfile)):
        if not Path(path).is_file():
            raise ConfigError(f"There is no file {path}: check the paths of certificate and key.")


def _bind(config: ServerConfig) -> socket.socket:
    """A socket on the address, taken before the model loads; it listens when that is done."""
    with ExitStack() as undo:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # Only where the protocol is named does asyncio switch off the delay of small packets: a
            # first token would wait 40 ms for the acknowledgement of the headers.
            listener = undo.enter_context(
                socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            )
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {config.host}, port {config.port} ({error.strerror}): choose "
                "another --host or --port."
            ) from error
        undo.pop_all()
    return listener


def _quit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _note_signal(number: int, frame: FrameType | None) -> None:
    """For a signal just before uvicorn takes them, and when it raises them again at its end."""
    _asked_to_stop.set()
