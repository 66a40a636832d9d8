"""The process that measures one cache precision: `python -m tightkv.benchmark.kv_worker`.

It reads a job from its standard input, and answers with lines of JSON: how far it is, and at last a
result or an error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from typing import Any

from tightkv.benchmark.kv_arm import ArmJob, measure_arm
from tightkv.errors import TightKVError

__all__: list[str] = []


def _serve_job() -> None:
    document = json.load(sys.stdin)
    lists = {name: tuple(document[name]) for name in ("contexts", "percentiles")}

    def tell_progress(stage: str, done: int, total: int) -> None:
        _tell(progress=[stage, done, total])

    try:
        result = measure_arm(ArmJob(**document | lists), progress=tell_progress)
    except TightKVError as error:
        _tell(error=str(error), kind=type(error).__name__)
    else:
        _tell(result=asdict(result))


def _tell(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the result any more
        _serve_job()
