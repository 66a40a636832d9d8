"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "num_cores"]

# Instruction sets that decide how fast attention and matrix products can be.
FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "asimd",
    "asimdhp",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    facts: dict[str, str] = {}
    processors = Path("/proc/cpuinfo")
    if processors.exists():
        for line in processors.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": num_cores(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
    }
