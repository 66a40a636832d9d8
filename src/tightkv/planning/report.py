"""A plan in words and tables of one language; how they are drawn is left to whoever prints them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tightkv.planning.capacity_plan import (
    CapacityPlan,
    Decode,
    FormatPlan,
    LayerKind,
    PlanSettings,
    Range,
)
from tightkv.planning.texts import Texts
from tightkv.planning.units import format_bytes

__all__ = ["Section", "as_markdown", "report"]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, sentences, and perhaps a table; the first column is text, others are numbers.

    Attributes:
        title: empty for the sentences at the top.
        is_list: whether the sentences are items of a list.
        text_columns: columns of the table that hold words.
    """

    title: str
    lines: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    is_list: bool = False
    text_columns: frozenset[int] = frozenset({0})


def report(plan: CapacityPlan, texts: Texts) -> tuple[Section, ...]:
    """Everything there is to say, in order."""
    sections = [
        _head(plan, texts),
        _waterfall(plan, texts),
        _formats(plan, texts),
        _layers(plan, texts),
        _needed(plan, texts),
    ]
    for title, messages in (
        ("recommendation", plan.recommendation),
        ("notes", plan.notes),
        ("not_modelled", plan.not_modelled),
    ):
        lines = tuple(texts.of(message) for message in messages)
        sections.append(Section(texts(title), lines, is_list=True))
    return tuple(section for section in sections if section.lines or section.rows)


def as_markdown(sections: Iterable[Section]) -> str:
    """The report as Markdown."""
    return "\n".join(line for section in sections for line in _markdown(section))


def _head(plan: CapacityPlan, texts: Texts) -> Section:
    model, settings = plan.model, plan.settings
    size = settings.tensor_parallel_size
    devices = texts(
        "devices" if size > 1 else "devices_one", size=size, hardware=plan.hardware.name
    )
    lines = (
        texts(
            "model_line",
            model_type=model.model_type,
            parameters=_count(model.num_parameters),
            layers=model.num_layers,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            max_position=model.max_position,
        ),
        texts(
            "settings_line",
            length=settings.max_model_len,
            typical_len=settings.typical_len,
            block_size=settings.block_size,
        ),
        texts(f"engine_{settings.engine}", size=size),
    )
    return Section(texts("title", name=model.name, devices=devices), lines)


def _waterfall(plan: CapacityPlan, texts: Texts) -> Section:
    size = plan.settings.tensor_parallel_size
    rows = tuple(
        (
            texts(f"term_{term.key}"),
            *(_bound(term.size, name) for name in ("low", "best", "high")),
            texts.of(term.basis)
            + (texts("of_devices", size=size) if term.key == "weights" and size > 1 else ""),
        )
        for term in plan.waterfall
    )
    columns = ("term", "low", "best", "high", "basis")
    headings = tuple(texts(f"col_{name}") for name in columns)
    is_guessed = not plan.pool.is_exact
    lines = (texts("waterfall_line"),) if is_guessed else ()
    return Section(texts("waterfall"), lines, headings, rows, text_columns=frozenset({0, 4}))


def _bound(size: Range, name: str) -> str:
    """The best guess always, the bounds where there is something to guess."""
    if size.is_exact and name != "best":
        return ""
    return format_bytes(getattr(size, name))


def _formats(plan: CapacityPlan, texts: Texts) -> Section:
    settings = plan.settings
    lengths = {"length": settings.max_model_len, "typical_len": settings.typical_len}
    columns: tuple[str, ...] = (
        "format",
        "bits",
        "per_token",
        *(("blocks",) if settings.engine == "tightkv" else ()),
        "tokens",
        "at_max",
        *(("at_typical",) if _has_typical(settings) else ()),
        "longest",
    )
    has_decode = any(formats.decode for formats in plan.formats)
    columns += ("decode",) if has_decode else ()
    headings = tuple(texts(f"col_{name}", **lengths) for name in (*columns, "fits"))
    rows = tuple(_format_row(formats, plan, texts, has_decode) for formats in plan.formats)
    return Section(texts("formats"), _format_lines(plan, texts), headings, rows)


def _has_typical(settings: PlanSettings) -> bool:
    """Whether an ordinary request is another than the longest: else one column tells of both."""
    return settings.typical_len != settings.max_model_len


def _format_row(
    formats: FormatPlan, plan: CapacityPlan, texts: Texts, has_decode: bool
) -> tuple[str, ...]:
    tokens = f"{formats.num_tokens.best:,}"
    if not formats.num_tokens.is_exact:
        tokens += f" ({formats.num_tokens.low:,}…{formats.num_tokens.high:,})"
    cells = [
        formats.name,
        f"{formats.effective_bits:.5g}",
        f"{formats.bytes_per_token:,.0f}",
        # Of another engine they fill the pool.
        *((format_bytes(formats.pool_bytes),) if plan.settings.engine == "tightkv" else ()),
        tokens,
        f"{formats.requests_at_max_len:,.2f}",
        *((f"{formats.requests_at_typical_len:,.1f}",) if _has_typical(plan.settings) else ()),
        f"{formats.longest_context:,}",
    ]
    if has_decode:
        decode = formats.decode
        cells.append(_decode(decode, texts) if decode else "-")
    cells.append(texts("fits_yes" if formats.fits else "fits_no"))
    return tuple(cells)


def _decode(decode: Decode, texts: Texts) -> str:
    return texts(
        "decode_cell",
        speed=decode.tokens_per_second,
        number=decode.num_requests,
        bound=texts(f"bound_{decode.bound}"),
    )


def _format_lines(plan: CapacityPlan, texts: Texts) -> tuple[str, ...]:
    settings = plan.settings
    stored = "; ".join(
        f"{formats.name}: {', '.join(map(texts.translated, formats.formats))}"
        for formats in plan.formats
        if formats.formats != (formats.name,)
    )
    size = settings.tensor_parallel_size
    lines = [
        texts(
            "request_line" if size == 1 else "request_line_shared",
            length=settings.max_model_len,
            sizes=_request_sizes(plan, 1),
            size=size,
            all_sizes=_request_sizes(plan, size),
        ),
        *_by_hand(plan, texts),
    ]
    if stored:
        lines.append(texts("stored_line", stored=stored))
    if any(formats.decode for formats in plan.formats) and plan.hardware.bandwidth:
        lines.append(
            texts(
                "decode_line",
                typical_len=settings.typical_len,
                bandwidth=plan.hardware.bandwidth / 1e9,
            )
        )
    elif plan.hardware.bandwidth is None:
        lines.append(texts("no_decode_line"))
    return tuple(lines)


def _request_sizes(plan: CapacityPlan, devices: int) -> str:
    return ", ".join(
        f"{format_bytes(formats.request_bytes * devices)} ({formats.name})"
        for formats in plan.formats
    )


def _by_hand(plan: CapacityPlan, texts: Texts) -> tuple[str, ...]:
    """The formula with this model's numbers, where all layers are alike."""
    model = plan.model
    is_latent = any(kind.kind == "latent" for fmt in plan.formats for kind in fmt.layers)
    if is_latent or not model.head_size or not model.value_size or model.num_shared_layers:
        return ()
    values = model.num_layers * model.num_kv_heads * (model.head_size + model.value_size)
    return (
        texts(
            "by_hand",
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            value_size=model.value_size,
            each=model.dtype_bytes,
            total=values * model.dtype_bytes,
            dtype=model.dtype,
        ),
    )


def _layers(plan: CapacityPlan, texts: Texts) -> Section:
    """Bytes by kind of layer, where there are several kinds."""
    kinds = plan.formats[0].layers
    if len(kinds) < 2:
        return Section(texts("layers"))
    headings = (texts("col_kind"), texts("col_number"), *(plan_.name for plan_ in plan.formats))
    rows = tuple(
        (
            _kind(kind, texts),
            str(kind.num_layers),
            *(f"{formats.layers[index].bytes_per_token:,.0f}" for formats in plan.formats),
        )
        for index, kind in enumerate(kinds)
    )
    return Section(texts("layers"), (), headings, rows)


def _kind(kind: LayerKind, texts: Texts) -> str:
    return texts(f"kind_{kind.kind}", window=kind.window or 0)


def _needed(plan: CapacityPlan, texts: Texts) -> Section:
    title = texts("needed", concurrency=plan.settings.concurrency or 0)
    headings = tuple(texts(f"col_{name}") for name in ("format", "length", "pool", "device"))
    rows = tuple(
        (
            formats.name,
            f"{needed.num_tokens:,}",
            format_bytes(needed.pool_bytes),
            format_bytes(needed.device_bytes),
        )
        for formats in plan.formats
        for needed in formats.needed
    )
    return Section(title, (), headings if rows else (), rows)


def _markdown(section: Section) -> Iterable[str]:
    if section.title:
        yield f"## {section.title}\n"
    if section.headings:
        yield f"| {' | '.join(section.headings)} |"
        marks = (
            "---" if i in section.text_columns else "---:" for i in range(len(section.headings))
        )
        yield f"|{'|'.join(marks)}|"
        for row in section.rows:
            yield f"| {' | '.join(row)} |"
        yield ""
    for line in section.lines:
        yield f"- {line}" if section.is_list else f"{line}\n"
    if section.is_list:
        yield ""


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
