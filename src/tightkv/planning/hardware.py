"""Accelerators by name: memory, bandwidth, and which 8-bit types they multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from tightkv.errors import ConfigError
from tightkv.kernels import converts_fp8
from tightkv.planning.memory import available_memory, installed_memory
from tightkv.planning.units import parse_rate, parse_size

__all__ = ["HOSTS", "Hardware", "find_hardware", "known_hardware"]

HOSTS = ("cpu", "host")
"""This machine: with all its memory, or with what is free now. TightKV serves on it."""

_CUSTOM = "custom:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device.

    Attributes:
        key: as it was asked for.
        name: for people.
        memory_bytes: in all, as its driver reports it; for "host" what is free.
        bandwidth: bytes per second from its memory, or None where nobody says.
        flops: dense 16-bit operations per second, or None.
        native_fp8: whether its matrix units multiply FP8.
        native_int8: whether they multiply INT8.
        max_num_batched_tokens: what the engine takes there by default.
        max_num_seqs: the same.
        sources: where the figures are from.
    """

    key: str
    name: str
    memory_bytes: int
    bandwidth: float | None
    flops: float | None
    native_fp8: bool
    native_int8: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    sources: tuple[str, ...]

    @property
    def is_host(self) -> bool:
        return self.key in HOSTS


@lru_cache
def known_hardware() -> Mapping[str, Hardware]:
    """The catalog, `hardware.yaml`."""
    text = files("tightkv.planning").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return {key: _from_entry(key, entry) for key, entry in yaml.safe_load(text).items()}


def find_hardware(text: str) -> Hardware:
    """A name of the catalog, `cpu`, `host`, or `custom:96GiB[,bandwidth=3.35TB/s,fp8=yes,…]`.

    Raises:
        ConfigError: for a name that is not known, or a custom one that is not understood.
    """
    key = text.strip().lower()
    if key in HOSTS:
        return _this_machine(key)
    if key.startswith(_CUSTOM):
        return _custom(text.strip())
    if key not in known_hardware():
        raise ConfigError(
            f"Unknown hardware {text!r}: choose one of {', '.join(known_hardware())}, "
            f"{', '.join(HOSTS)}, or custom:96GiB."
        )
    return known_hardware()[key]


def _from_entry(key: str, entry: Mapping[str, Any]) -> Hardware:
    return Hardware(
        key=key,
        name=entry["name"],
        memory_bytes=entry["memory_mib"] * 2**20,
        bandwidth=entry["bandwidth_gbs"] * 1e9,
        flops=entry["tflops"] * 1e12,
        native_fp8=_has_fp8(entry),
        native_int8=entry["native_int8"],
        max_num_batched_tokens=entry["batched_tokens"],
        max_num_seqs=entry["max_num_seqs"],
        sources=tuple(entry["sources"]),
    )


def _has_fp8(entry: Mapping[str, Any]) -> bool:
    if "capability" in entry:
        major, minor = entry["capability"]
        return converts_fp8((major, minor))
    return bool(entry["native_fp8"])


def _this_machine(key: str) -> Hardware:
    memory = installed_memory() if key == "cpu" else available_memory()
    if memory is None:
        raise ConfigError(
            "This system does not tell its memory (/proc/meminfo): give it as custom:96GiB."
        )
    return Hardware(
        key=key,
        name="this machine" if key == "cpu" else "this machine, with what is free now",
        memory_bytes=memory,
        bandwidth=None,
        flops=None,
        native_fp8=False,
        native_int8=True,
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        sources=("/proc/meminfo",) if key == "cpu" else ("/proc/meminfo, cgroups",),
    )


def _custom(text: str) -> Hardware:
    size, *settings = text[len(_CUSTOM) :].split(",")
    given = dict(setting.partition("=")[::2] for setting in settings)
    surplus = set(given) - {"bandwidth", "flops", "fp8", "int8"}
    if surplus:
        raise ConfigError(
            f"Unknown property {min(surplus)!r} in {text!r}: choose among bandwidth=3.35TB/s, "
            "flops=989TFLOPS, fp8=yes and int8=no."
        )
    return Hardware(
        key=text,
        name=text,
        memory_bytes=_memory(text, size),
        bandwidth=parse_rate(given["bandwidth"], "B/s") if "bandwidth" in given else None,
        flops=parse_rate(given["flops"], "FLOPS") if "flops" in given else None,
        native_fp8=_is_yes(text, given.get("fp8", "no")),
        native_int8=_is_yes(text, given.get("int8", "yes")),
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        sources=("the user",),
    )


def _memory(text: str, size: str) -> int:
    try:
        return parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"{text!r} has no memory, since {error}") from error


def _is_yes(text: str, answer: str) -> bool:
    if answer not in ("yes", "no"):
        raise ConfigError(f"{text!r} has {answer!r} where yes or no belongs: choose one of them.")
    return answer == "yes"
