"""Writes docs/metrics.md: `python -m tightkv.metrics.document docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tightkv.metrics.catalogue import CATALOGUE, Metric

__all__ = ["page"]

_HEAD = """\
# Metrics

`GET /metrics` answers in Prometheus' text form, or in OpenMetrics' where the request asks for it.
What stands under `vllm:` has vLLM's name, labels and buckets, so that boards and alerts made for
vLLM work; what stands under `tightkv:` no other engine shows. Every metric has the labels `engine`
(always `0`) and `model_name`, besides those named here. A histogram has `_bucket`, `_sum` and
`_count`. Times and lengths are those of requests that ended by `stop` or `length`. What is read
from the engine is at most about a second old. Besides, there are the process's own `process_…`.

`deploy/grafana/tightkv.json` is a dashboard of them. This page is made from
`src/tightkv/metrics/catalogue.py` by `make docs`.
"""


def page() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *_sections(), _buckets()])


def _sections() -> Iterator[str]:
    for title, metrics in CATALOGUE.items():
        rows = "\n".join(map(_row, metrics))
        yield f"## {title}\n\n| Metric | Kind | Labels | Meaning |\n|---|---|---|---|\n{rows}\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.series}` | {metric.kind} | {labels} | {metric.help} |"


def _buckets() -> str:
    """The buckets, each with the histograms that have them."""
    names: dict[tuple[float, ...], list[str]] = {}
    for metric in chain.from_iterable(CATALOGUE.values()):
        if metric.buckets:
            names.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    rows = "\n".join(
        f"| {', '.join(having)} | {', '.join(f'{bound:g}' for bound in buckets)} |"
        for buckets, having in names.items()
    )
    return f"## Buckets\n\n| Histograms | Upper bounds |\n|---|---|\n{rows}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
