"""Forms of a report: for a terminal, for a pull request, for a browser."""

from __future__ import annotations

from pathlib import Path

from tightkv.evaluation.report import EvaluationReport
from tightkv.files import atomic_file

__all__ = ["write_report"]


def write_report(report: EvaluationReport, folder: Path) -> None:
    """Write report.json, report.md and report.html; the same report gives the same bytes.

    Raises:
        OutputError: if one of them cannot be written.
    """
    # Here, since matplotlib takes a second to import, and a verdict needs none of it.
    from tightkv.evaluation.render.html import html
    from tightkv.evaluation.render.markdown import markdown

    texts = {
        "report.json": f"{report.model_dump_json(indent=2)}\n",
        "report.md": markdown(report),
        "report.html": html(report),
    }
    for name, text in texts.items():
        with atomic_file(folder / name) as file:
            file.write(text.encode())
