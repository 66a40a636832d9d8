from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from evaluation.sample_report import BUCKETS, HOSTILE, SKETCHES, Sketch, sample_report
from tightkv.evaluation.render import write_report
from tightkv.evaluation.render.html import html
from tightkv.evaluation.render.markdown import markdown
from tightkv.evaluation.render.numbers import change, kld, percent, points, with_error
from tightkv.evaluation.render.statistics import statistics_blocks
from tightkv.evaluation.render.terminal import print_report
from tightkv.evaluation.report import EvaluationReport

# Elements without an end tag.
VOID = {"meta", "br", "img", "link", "input", "hr"}


@cache
def full_report() -> EvaluationReport:
    return sample_report((SKETCHES[2], SKETCHES[4]))


@cache
def small_report() -> EvaluationReport:
    return sample_report(SKETCHES[:1], is_full=False, buckets=BUCKETS[:1])


@cache
def full_page() -> str:
    return html(full_report())


@cache
def small_page() -> str:
    return html(small_report())


class Page(HTMLParser):
    """Elements in order, text, and what is wrong with the nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def printed(report: EvaluationReport, *, details: bool = False, width: int = 100) -> str:
    file = io.StringIO()
    print_report(report, Console(file=file, width=width), details=details)
    return file.getvalue()


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = Page(full_page())
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    ids = page.values("id")
    assert len(set(ids)) == len(ids)
    references = page.values("href") + re.findall(r"url\(([^)]*)\)", full_page())
    assert references
    assert {reference.lstrip("#") for reference in references} <= set(ids)
    assert all(reference.startswith("#") for reference in references)
    assert not re.search(r"https?://|@import|@font-face|\bon\w+=", full_page())
    assert "'DejaVu" not in full_page()


def test_every_plot_says_what_it_shows() -> None:
    page = Page(full_page())
    labelled = sum(1 for tag, name, _ in page.attributes if (tag, name) == ("svg", "aria-label"))
    hidden = sum(1 for tag, name, _ in page.attributes if (tag, name) == ("svg", "aria-hidden"))
    # 4 by position, the Pareto front, 3 by layer, tasks, 3 heat maps; the rest are the legend's.
    assert labelled == 4 + 1 + 3 + 1 + 3
    assert labelled + hidden == page.tags.count("svg")


def test_what_users_wrote_is_text() -> None:
    assert HOSTILE not in full_page()
    assert "&lt;script&gt;alert" in full_page()
    assert HOSTILE in "".join(Page(full_page()).texts)
    hostile = full_report().arms[0].model_copy(update={"name": "int8@$a$<b>&.json"})
    report = small_report().model_copy(
        update={"model": HOSTILE, "baseline": "<i>", "arms": (hostile, full_report().arms[1])}
    )
    page = Page(html(report))
    # `b` is the page's own: the names of the arms.
    assert not {"script", "i", "code"} & set(page.tags)
    assert page.tags.count("b") == len(report.arms)
    assert "int8@$a$<b>&.json" in page.texts


def test_sections_are_there_if_they_were_measured() -> None:
    sections = {"position", "memory", "layers", "tasks", "retrieval", "answers", "all"}
    assert sections <= set(Page(full_page()).values("id"))
    assert sections & set(Page(small_page()).values("id")) == {"all"}
    titles = ("## Layers", "## Generation", "## Tasks", "## Retrieval", "by position", "only")
    assert all(title in markdown(full_report()) for title in titles)
    assert not any(title in markdown(small_report()) for title in titles)
    assert "gsm8k" in printed(full_report())
    assert "ROUGE" not in printed(small_report())


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    report = full_report()
    again = EvaluationReport.model_validate_json(report.model_dump_json())
    assert again == report
    assert html(again) == full_page()
    assert markdown(again) == markdown(report)
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_report(small_report(), folder)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["report.html", "report.json", "report.md"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    read = EvaluationReport.model_validate_json((tmp_path / "a" / "report.json").read_bytes())
    assert read == small_report()


def test_reports_at_the_edges_can_be_rendered() -> None:
    """Figures that are no numbers, a cache that loses nothing, and more arms than colours."""
    arm = full_report().arms[0]
    overall = arm.fidelity["prefill"].overall
    wrong = replace(
        overall,
        ppl=math.inf,
        ppl_ratio=math.nan,
        same_top_p=math.nan,
        kld=replace(overall.kld, mean=math.nan, maximum=math.inf),
    )
    bucket = arm.fidelity["prefill"].buckets[0].model_copy(update={"figures": wrong})
    read = arm.fidelity["prefill"].model_copy(
        update={"overall": wrong, "buckets": (bucket, *arm.fidelity["prefill"].buckets[1:])}
    )
    broken = arm.model_copy(update={"name": "broken", "fidelity": {"prefill": read}})
    exact = Sketch("float32", "float32", 46080, 0.0, 0.0)
    more = [replace(SKETCHES[0], name=f"int8@{index}.json") for index in range(6)]
    report = sample_report([exact, *more], is_full=False, buckets=BUCKETS[:2])
    report = report.model_copy(update={"arms": (broken, *report.arms)})
    back = EvaluationReport.model_validate_json(report.model_dump_json())
    assert math.isnan(back.arms[0].fidelity["prefill"].overall.kld.mean)
    assert "NaN" in "".join(Page(html(back)).texts)
    assert "| NaN |" in markdown(back)
    assert "NaN" in printed(back, details=True)


def test_text_fits_100_columns() -> None:
    for report in (full_report(), small_report()):
        assert max(map(len, printed(report, details=True, width=300).splitlines())) <= 100
    lines = printed(full_report()).splitlines()
    for arm in full_report().arms:
        row = next(line for line in lines if line.startswith(arm.name))
        assert row.split()[-1] == arm.verdict.level
        assert all(reason.split()[0] in "\n".join(lines) for reason in arm.verdict.reasons)


def test_details_are_what_llama_perplexity_prints() -> None:
    text = printed(small_report(), details=True)
    for line in (
        "====== Perplexity statistics ======",
        "Mean PPL(Q)                   :  11.884783",
        "Mean PPL(Q)/PPL(base)         :   1.000150 ±   0.000271",
        "====== KL divergence statistics ======",
        "Mean    KLD:   0.000300 ±   0.000015",
        "Maximum KLD:   0.048000",
        "99.9%   KLD:   0.018000",
        " 5.0%   KLD:   0.000001",
        "Median  KLD:   0.000120",
        "====== Token probability statistics ======",
        "Mean    Δp: -0.007 ± 0.027 %",
        "Same top p: 99.020 ± 0.154 %",
    ):
        assert line in text
    assert "Mean    KLD" not in printed(small_report())
    blocks = statistics_blocks(small_report().arms[0].fidelity["decode"].overall)
    assert [title.split()[0] for title, _ in blocks] == ["Perplexity", "KL", "Token"]


def test_markdown_holds_its_tables_and_blocks_together() -> None:
    text = markdown(full_report())
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1
    # The prompt holds ```: its fence is longer.
    assert f"````text\nWhat does this page show? {HOSTILE}\n````" in text
    assert text.count("<details>") == len(full_report().arms) == text.count("</details>")
    prose = re.sub(r"(`{3,})text\n.*?\n\1|`[^`\n]*`", "", text, flags=re.DOTALL)
    assert "<script" not in prose
    # Without a code span, GitHub would call somebody of that name.
    assert not re.search(r"@\w", prose.replace("<summary>Worst answers of int8@", ""))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00084, "0.00084"),
        (0.0163499, "0.0163"),
        (1.5, "1.5"),
        (12.346, "12.35"),
        (1.2e-7, "1.2e-7"),
        (1e-6, "1e-6"),
        (-3e-9, "-3e-9"),
        (math.nan, "NaN"),
        (-math.inf, "-∞"),
    ],
)
def test_kld(value: float, text: str) -> None:
    assert kld(value) == text


def test_other_numbers() -> None:
    assert with_error(0.0084312, 0.00031) == "0.00843 ± 0.00031"
    assert with_error(0.0, 0.0) == "0 ± 0"
    assert with_error(math.nan, 0.1) == "NaN ± 0.1"
    assert [percent(0.98734), percent(1.0), percent(0.999999)] == [
        "98.73 %",
        "100.00 %",
        "> 99.99 %",
    ]
    assert [percent(0.0), percent(1e-9, 1)] == ["0.00 %", "< 0.1 %"]
    assert [points(0.0345), points(-0.0001), points(0.03)] == ["3.5", "0", "3"]
    assert [change(1.0052), change(0.99999), change(0.9)] == ["+0.52 %", "+0.00 %", "-10.00 %"]
