"""Does the server's memory stay where it is? Load over and over, RSS between.

    python tests/server/soak.py MODEL [--minutes 20] [--clients 16]

The server is a process of its own. Ends with one JSON line: RSS in MiB after the first tenth of
the time and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_server import server_process
from server.load import make_tasks, run_load

_MIB = 2**20
_REQUESTS_PER_ROUND = 100


def rss(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(model: str, seconds: float, num_clients: int, *arguments: str) -> list[int]:
    """RSS in bytes after each round of requests.

    Raises:
        AssertionError: if an answer is missing or differs from that of the idle server.
    """
    sizes: list[int] = []
    with server_process(model, *arguments) as (process, url):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tasks = make_tasks(256, 10, 64, 32)
            report = asyncio.run(run_load(url, tasks, num_clients, _REQUESTS_PER_ROUND))
            assert not report.wrong, report.wrong[:3]
            sizes.append(rss(process.pid))
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description="The server's memory over time.")
    parser.add_argument("model", help="folder or GGUF file")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    sizes = soak(
        options.model,
        60 * options.minutes,
        options.clients,
        "--kv-cache-dtype",
        "int8",
        "--kv-cache-memory-bytes",
        "64MiB",
    )
    settled = sizes[len(sizes) // 10]
    print(
        json.dumps(
            {
                "benchmark": "server_soak",
                "minutes": options.minutes,
                "requests": len(sizes) * _REQUESTS_PER_ROUND,
                "rss_settled_mib": settled / _MIB,
                "rss_end_mib": sizes[-1] / _MIB,
                "rss_max_mib": max(sizes) / _MIB,
            }
        )
    )


if __name__ == "__main__":
    main()
