"""Makes what is measured importable on a machine that has PyTorch and Triton, and maybe no more."""

from __future__ import annotations

import sys
import types
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"

_EXTENSION = "tightkv.kernels._native"


def make_importable() -> str | None:
    """Import TightKV, or at least its Triton kernels.

    The C++ extension is not needed on a GPU: where it is not built, an empty module takes its
    place. Where the engine's other requirements are missing, the packages become mere folders, so
    that the kernels can be imported.

    Returns:
        Why the engine cannot be imported; None if it can.
    """
    reason = _reason()
    if reason is not None and "_native" in reason:
        sys.modules[_EXTENSION] = types.ModuleType(_EXTENSION)
        reason = _reason()
    if reason is not None:
        for name in ("tightkv", "tightkv.formats", "tightkv.kernels"):
            package = types.ModuleType(name)
            package.__path__ = [str(SOURCES.joinpath(*name.split(".")))]
            sys.modules[name] = package
    return reason


def _reason() -> str | None:
    try:
        import tightkv  # noqa: F401
    except ImportError as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tightkv"]:
            if name != _EXTENSION:
                del sys.modules[name]
        return str(error)
    return None
