"""How much memory this process had at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

__all__ = ["forget_peak", "peak_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """The largest resident size since the process began, or since `forget_peak`."""
    if _STATUS.exists():
        # Linux counts in ru_maxrss also what the parent held when it made this process.
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> bool:
    """Count the peak from now on; False where the system cannot."""
    try:
        _CLEAR_REFS.write_text("5")  # man proc_pid_clear_refs
    except OSError:
        return False
    return True
