"""Plots as SVG text, which takes its colours and its font from the page around it."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from tightkv.evaluation.render.numbers import kld, positions
from tightkv.evaluation.report import (
    ArmReport,
    EvaluationReport,
    LayerFigures,
    PassName,
    RetrievalCell,
    TaskFigures,
)
from tightkv.metrics import DivergenceFigures

__all__ = [
    "bucket_plot",
    "heat_map",
    "layer_plot",
    "legend",
    "pareto_plot",
    "task_plot",
]

# In inches at 72 points: as wide as a phone, so that text is never shrunk below its size.
_WIDTH, _HEIGHT = 4.6, 2.9

# What lies lower, beside what lies highest, is as good as nothing.
_DECADES = 5

# Written by matplotlib, then replaced by what the page says: ink, thin lines, the limit, the back.
_INK, _LINE, _LIMIT, _BACK = "#010203", "#010204", "#010205", "#010206"
_VARIABLES = {
    _INK: "var(--ink)",
    _LINE: "var(--line)",
    _LIMIT: "var(--limit)",
    _BACK: "var(--card)",
}

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow and black;
# beyond six arms they repeat with other markers.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKERS = "osD^vPX*<>hp"

# Keeps lines off the words.
_BEHIND: dict[str, Any] = {"facecolor": _BACK, "edgecolor": "none", "pad": 1}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tightkv",
    "text.parse_math": False,  # names of files and tasks may have dollar signs
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
}


def legend(arms: Sequence[ArmReport]) -> list[tuple[str, str]]:
    """Name of each arm, and a small SVG of its marker."""
    signs = []
    for index, arm in enumerate(arms):
        with _axes(0.36, 0.2, layout=None) as (figure, axes):
            axes.set_axis_off()
            axes.set_position((0, 0, 1, 1))
            axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **_look(index))
            svg = _svg(figure, f"legend-{index}", "")
        signs.append((arm.name, svg))
    return signs


def bucket_plot(report: EvaluationReport, name: PassName, *, of_top: bool) -> str:
    """Mean KLD (logarithmic), or same top p, over the position; with one standard error."""
    what = "same top p, %" if of_top else "mean KLD"
    limit = 100 * report.thresholds.min_top1 if of_top else report.thresholds.max_kld
    value = _top if of_top else _kld_mean
    reads = {i: arm.fidelity[name] for i, arm in enumerate(report.arms) if name in arm.fidelity}
    spans = sorted({(b.begin, b.end) for read in reads.values() for b in read.buckets})
    with _axes(_WIDTH, _HEIGHT) as (figure, axes):
        drawn = [limit]
        for index, read in reads.items():
            places = [spans.index((b.begin, b.end)) for b in read.buckets]
            means, errors = zip(*(value(b.figures) for b in read.buckets), strict=True)
            drawn += [mean - error * of_top for mean, error in zip(means, errors, strict=True)]
            axes.errorbar(places, means, errors, elinewidth=0.8, **_look(index))
        axes.set_xticks(range(len(spans)), [_short(*span) for span in spans])
        axes.set_xlabel("tokens before")
        axes.set_ylabel(what)
        if of_top:
            lowest = min(filter(math.isfinite, drawn))
            axes.set_ylim(lowest - 0.08 * (101 - lowest), 100.2)
        else:
            _logarithmic(axes, drawn)
        _limit_line(axes, limit)
        title = f"{what} by position, {name}; the dashed line is the limit"
        return _svg(figure, f"{'top' if of_top else 'kld'}-{name}", title)


def layer_plot(report: EvaluationReport, what: str, title: str) -> str | None:
    """A share of each layer, in percent; None if it is 0 everywhere.

    Args:
        what: name of the field of `LayerFigures`.
        title: in words.
    """
    value: Callable[[LayerFigures], float] = lambda layer: 100 * getattr(layer, what)  # noqa: E731
    lines = {
        index: [(layer.layer_idx, value(layer)) for layer in arm.layers]
        for index, arm in enumerate(report.arms)
        if any(value(layer) > 0 for layer in arm.layers)
    }
    if not lines:
        return None
    with _axes(_WIDTH, _HEIGHT) as (figure, axes):
        for index, points in lines.items():
            look = _look(index) | {"markersize": 3, "linewidth": 1}
            axes.plot(*zip(*points, strict=True), **look)
        _logarithmic(axes, [share for points in lines.values() for _, share in points])
        axes.set_xlabel("layer")
        axes.set_ylabel(f"{title}, %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure, what, f"{title} of each layer, in percent")


def pareto_plot(report: EvaluationReport) -> str | None:
    """Mean KLD of the worse pass over bytes per token, with the front of those no other beats.

    None if there are not two arms to compare.
    """
    places = {
        index: (arm.cache.bytes_per_token, max(r.overall.kld.mean for r in arm.fidelity.values()))
        for index, arm in enumerate(report.arms)
        if arm.fidelity
    }
    places = {index: place for index, place in places.items() if 0 < place[1] < math.inf}
    if len(places) < 2:
        return None
    with _axes(_WIDTH, 3.4) as (figure, axes):
        for index, place in places.items():
            axes.plot(*place, **_look(index) | {"linestyle": "none", "markersize": 7})
        limit = report.thresholds.max_kld
        _logarithmic(axes, [*(y for _, y in places.values()), limit])
        _limit_line(axes, limit)
        base = report.baseline_cache.bytes_per_token
        widest = max(base, *(x for x, _ in places.values()))
        axes.set_xlim(0, 1.08 * widest)
        front = _front(list(places.values()))
        front = [(front[0][0], axes.get_ylim()[1]), *front, (axes.get_xlim()[1], front[-1][1])]
        axes.step(*zip(*front, strict=True), where="post", color=_INK, linewidth=0.8, zorder=1)
        axes.axvline(base, color=_LINE, linewidth=1.2)
        axes.annotate(
            f"{report.baseline} ",
            (base, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="top",
            fontsize=8.5,
            bbox=_BEHIND,
        )
        axes.set_xlabel("bytes per token")
        axes.set_ylabel("mean KLD, worse pass")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        names = {index: report.arms[index].name for index in places}
        _label(axes, {names[index]: place for index, place in places.items()})
        listed = ", ".join(f"{names[i]} {x:,.0f} bytes {kld(y)}" for i, (x, y) in places.items())
        return _svg(figure, "pareto", f"Mean KLD over bytes per token: {listed}")


def task_plot(report: EvaluationReport) -> str | None:
    """Points lost in each task, with 95 % intervals."""
    rows: dict[str, list[tuple[int, TaskFigures]]] = {}
    for index, arm in enumerate(report.arms):
        for figures in arm.tasks:
            rows.setdefault(f"{figures.task}, {figures.metric}", []).append((index, figures))
    if not rows:
        return None
    height = 0.9 + sum(0.28 + 0.17 * len(row) for row in rows.values())
    with _axes(_WIDTH, height) as (figure, axes):
        place = 0.0
        for name, row in rows.items():
            axes.text(0, place, name, transform=axes.get_yaxis_transform(), va="center")
            place += 1.1
            for index, of in row:
                left, right = of.drop - of.drop_low, of.drop_high - of.drop
                spread = [[100 * max(left, 0)], [100 * max(right, 0)]]
                look = _look(index) | {"linestyle": "none"}
                axes.errorbar([100 * of.drop], [place], xerr=spread, capsize=2.5, **look)
                place += 1
            place += 0.7
        axes.set_ylim(place - 0.7, -0.8)
        axes.set_yticks([])
        axes.axvline(0, color=_INK, linewidth=0.8)
        axes.axvline(
            100 * report.thresholds.max_accuracy_drop, color=_LIMIT, linewidth=1, linestyle="--"
        )
        axes.set_xlabel("points lost")
        title = "Points lost in each task with 95 % intervals; the dashed line is the limit"
        return _svg(figure, "tasks", title)


def heat_map(name: str, title: str, cells: Sequence[RetrievalCell]) -> str:
    """Share of the hidden words found, by length and depth.

    Args:
        name: unlike that of other plots of the page.
        title: whose cells these are.
    """
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    with _axes(max(2.6, 0.6 + 0.5 * len(lengths)), 1 + 0.27 * len(depths)) as (figure, axes):
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        shares = [[math.nan] * len(lengths) for _ in depths]
        for cell in cells:
            x, y = lengths.index(cell.length), depths.index(cell.depth)
            shares[y][x] = cell.found
            # Both ends of the scale are dark.
            ink = "#ffffff" if abs(cell.found - 0.5) > 0.38 else "#000000"
            axes.text(
                x + 0.5, y + 0.5, f"{100 * cell.found:.0f}", color=ink, ha="center", va="center"
            )
        axes.pcolormesh(shares, cmap="RdYlBu", vmin=0, vmax=1, edgecolors=_BACK, linewidth=1.5)
        axes.invert_yaxis()
        axes.set_xticks([x + 0.5 for x in range(len(lengths))], [f"{n:,}" for n in lengths])
        axes.set_yticks([y + 0.5 for y in range(len(depths))], [f"{100 * d:.0f} %" for d in depths])
        axes.tick_params(length=0)
        axes.set_xlabel("tokens")
        axes.set_ylabel("depth")
        return _svg(figure, name, f"Hidden words found by {title}, in percent, by length and depth")


def _top(figures: DivergenceFigures) -> tuple[float, float]:
    return 100 * figures.same_top_p, 100 * figures.same_top_p_standard_error


def _kld_mean(figures: DivergenceFigures) -> tuple[float, float]:
    return figures.kld.mean, figures.kld.standard_error


def _look(index: int) -> dict[str, Any]:
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markeredgecolor": _BACK,
        "markeredgewidth": 0.6,
    }


def _front(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those to which no other is equal or better in both numbers, by the first."""
    front: list[tuple[float, float]] = []
    for place in sorted(places):
        if not front or place[1] < front[-1][1]:
            front.append(place)
    return front


def _label(axes: Axes, places: dict[str, tuple[float, float]]) -> None:
    """Names beside their points, pushed apart where they would lie on each other."""
    pixels = {name: axes.transData.transform(place) for name, place in places.items()}
    bottom = -1e9
    for name, (_, y) in sorted(pixels.items(), key=lambda item: (item[1][1], item[0])):
        height = max(y, bottom + 11)
        bottom = height
        axes.annotate(
            name,
            places[name],
            xytext=(12, height - y),
            textcoords="offset pixels",
            va="center",
            fontsize=8.5,
            bbox=_BEHIND,
            arrowprops={"arrowstyle": "-", "color": _LINE, "linewidth": 0.6, "shrinkA": 0},
        )


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """A scale that holds what is above 0 and finite, with labels as the tables have them."""
    values = [value for value in values if 0 < value < math.inf]
    if not values:
        return
    axes.set_yscale("log")
    lowest = max(min(values), max(values) / 10**_DECADES)
    axes.set_ylim(lowest / 1.8, max(values) * 1.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: kld(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if max(values) / lowest < 12:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: kld(y)))


def _limit_line(axes: Axes, limit: float) -> None:
    axes.axhline(limit, color=_LIMIT, linewidth=1, linestyle="--")


def _short(begin: int, end: int) -> str:
    """Long ones in 1,024 tokens, as 4k to 8k."""
    if begin % 1024 == 0 and end % 1024 == 0:
        return f"{begin // 1024}k–{end // 1024}k"  # noqa: RUF001
    return positions(begin, end + 1).replace(",", "")


@contextmanager
def _axes(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Iterator[tuple[Figure, Axes]]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=72, layout=layout)
        FigureCanvasSVG(figure)
        yield figure, figure.subplots()


def _svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an element of a page: its own names, the page's colours, a label for readers.

    Args:
        name: prefix of what the element names, unlike that of other plots of the page.
        title: what it shows, for those who cannot see it; empty if the text beside it says so.
    """
    file = io.StringIO()
    figure.savefig(
        file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
    )
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    unnamed = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def named(match: re.Match[str]) -> str:
        """Names that are used, each once: matplotlib writes a marker again for each line."""
        if match[1] not in unnamed:
            return ""
        unnamed.remove(match[1])
        return f' id="{name}-{match[1]}"'

    svg = re.sub(r' id="([^"]+)"', named, svg)
    svg = re.sub(r'(href="#|url\(#)([^")]+)', rf"\g<1>{name}-\g<2>", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    # A style of the element would be one of the page, and the page's font is the readers' own.
    svg = re.sub(r"<style.*?</style>| ?font-family: [^;]+;", "", svg, flags=re.DOTALL)
    label = f'role="img" aria-label="{html.escape(title)}"' if title else 'aria-hidden="true"'
    view = re.search(r'viewBox="([^"]+)"', svg)
    assert view is not None
    return f'<svg viewBox="{view[1]}" {label}>{svg[svg.index(">") + 1 :]}'
