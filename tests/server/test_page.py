"""The page in a headless Chromium, against canned answers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_states import BLOCK_BYTES, FULL, pool, snapshot, state, swapping
from page_server import PageServer, page_server
from tightkv.metrics import GroupSnapshot
from tightkv.server.state import QualitySummary

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
expect = playwright.expect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)"),
]

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
QUALITY = QualitySummary(
    sample_rate=0.01, num_requests=37, num_tokens=4120, mean_kl=0.000431, same_top=0.9896
)
WINDOW = GroupSnapshot(sliding_window=512, num_used_blocks=7000)
TWO_KINDS = snapshot(pool(20_000, BLOCK_BYTES // 6), groups=(FULL, WINDOW, WINDOW))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server() as server:
        yield server


class Watched:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(
            viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
        )
        self.page.set_default_timeout(10_000)
        self.console: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))

    def open(self, server: PageServer) -> Any:
        self.page.goto(server.url)
        return self.page


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    watched = Watched(browser)
    yield watched
    watched.page.close()


def test_it_shows_the_state(server: PageServer, watched: Watched) -> None:
    server.state = state(quality=QUALITY)
    page = watched.open(server)
    expect(page.locator("h1")).to_have_text("SmolLM2-135M-Instruct")
    expect(page.locator("#health")).to_have_text("Healthy")
    expect(page.locator("#format")).to_contain_text("int8 (8.25 bits, two-factor scales)")
    expect(page.locator("#uptime")).to_have_text("Up 3 h 13 min")
    expect(page.locator("#memory")).to_contain_text("257 MiB")
    blocks = pool(174).blocks
    for label, letter in (("In use", "u"), ("Shared prefix", "s"), ("Cached", "c"), ("Free", ".")):
        entry = page.locator(".legend li", has_text=label)
        expect(entry).to_have_text(f"{label} {blocks.count(letter)}")
    expect(page.locator("#requests tr")).to_have_count(4)
    expect(page.locator("#requests tr").nth(0)).to_contain_text("119 / 256")
    expect(page.locator("#requests tr").nth(2)).to_contain_text("prompt 56 %")
    expect(page.locator("#layers-note")).to_have_text("More than 0.1 % clipped: 4 K, 17 K")
    expect(page.locator(".tile .over")).to_have_count(2)
    expect(page.locator("#formats tr")).to_have_count(2)
    expect(page.locator("#quality")).to_contain_text("98.96 %")
    expect(page.locator("#quality")).to_contain_text("0.00043")
    assert watched.console == []
    assert all(url.startswith((server.url, "data:")) for url in watched.requested)


def test_swap_space_is_shown_where_there_is_one(server: PageServer, watched: Watched) -> None:
    page = watched.open(server)
    expect(page.locator("h1")).to_have_text("SmolLM2-135M-Instruct")
    expect(page.locator("#swap")).to_be_hidden()
    server.state = state(swapping())
    expect(page.locator("#swap-note")).to_have_text(
        "11.1 MiB of sequences and 218 MiB of prefixes in 1.00 GiB"
    )
    for term, figure in (
        ("Swapped sequences", "2"),
        ("Blocks in", "1,621"),
        ("Bytes in", "294 MiB"),
    ):
        expect(page.locator("#swap-figures div", has_text=term)).to_have_text(term + figure)
    assert watched.console == []


def test_it_refreshes_without_moving(server: PageServer, watched: Watched) -> None:
    page = watched.open(server)
    expect(page.locator("#requests tr")).to_have_count(4)
    before = _places(page)
    server.state = state(snapshot(requests=()))
    expect(page.locator("#no-requests")).to_be_visible()
    expect(page.locator("#requests-count")).to_contain_text("0 running, 0 waiting")
    assert _places(page) == before
    assert watched.console == []


def test_text_of_the_server_is_never_markup(server: PageServer, watched: Watched) -> None:
    server.state["server"]["model"] = "<img src=x onerror=alert(1)>"
    server.words = ["<script>alert(2)</script>", "<b>bold</b>"]
    page = watched.open(server)
    expect(page.locator("h1")).to_have_text("<img src=x onerror=alert(1)>")
    expect(page.locator("#requests")).to_contain_text("<b>named by the client")
    _ask(page, "Hello")
    expect(page.locator(".turn .text").nth(1)).to_have_text("".join(server.words))
    assert page.locator("main img, main b b, .log b, .log script").count() == 0


def test_many_blocks_of_two_groups(server: PageServer, watched: Watched) -> None:
    server.state = state(TWO_KINDS)
    page = watched.open(server)
    expect(page.locator(".pool")).to_have_count(1)
    expect(page.locator(".pool h3")).to_have_text(
        "Full attention: 80 blocks, sliding window of 512 tokens: 14,000 blocks"
    )
    expect(page.locator(".pool .head").nth(0)).to_contain_text("20 to a square")
    free = f"free {TWO_KINDS.pool.blocks.count('.')}"
    expect(page.locator("canvas").nth(0)).to_have_attribute("aria-label", _ending(free))
    colors = (
        page.locator("canvas")
        .nth(0)
        .evaluate(
            """(canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join());
          return [...seen];
        }"""
        )
    )
    assert {"37,99,168,255", "217,122,29,255", "143,199,181,255", "228,232,236,255"} <= set(colors)


def test_chat_streams(server: PageServer, watched: Watched) -> None:
    page = watched.open(server)
    _ask(page, "What is paged attention?")
    expect(page.locator(".turn .text").nth(1)).to_have_text("".join(server.words))
    expect(page.locator(".turn .meta")).to_contain_text("9 tokens")
    expect(page.locator(".turn .meta")).to_contain_text("tokens/s")
    expect(page.locator(".turn .meta")).to_contain_text("32 of 41 prompt tokens cached")
    _ask(page, "And then?")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator("#send")).to_be_visible()
    path, body = server.bodies[1]
    assert path == "/v1/chat/completions"
    assert body["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".turn")).to_have_count(0)
    assert watched.console == []


def test_chat_can_be_stopped(server: PageServer, watched: Watched) -> None:
    server.words = ["word "] * 500
    server.pause = 0.02
    page = watched.open(server)
    _ask(page, "Count")
    expect(page.locator(".turn .meta")).to_contain_text("tokens/s")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn .meta")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    assert server.was_left.wait(5)


def test_chat_errors_are_sentences(server: PageServer, watched: Watched) -> None:
    page = watched.open(server)
    page.get_by_label("Most tokens").fill("5000")
    _ask(page, "Hello")
    expect(page.locator(".failed")).to_have_text("max_tokens is <i>too many</i>.")
    expect(page.get_by_label("Message")).to_have_value("Hello")
    page.get_by_label("Most tokens").fill("10")
    server.stream_error = "K or V has a NaN."
    _ask(page, "Hello")
    expect(page.locator(".failed").nth(1)).to_have_text("K or V has a NaN.")


def test_without_a_chat_template_it_completes(server: PageServer, watched: Watched) -> None:
    server.state = state(chat=False)
    page = watched.open(server)
    expect(page.locator("#chat-note")).to_contain_text("continues your text")
    page.get_by_label("Text to continue").fill("Once upon a time")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .text").nth(1)).to_have_text("".join(server.words))
    path, body = server.bodies[0]
    assert (path, body["prompt"]) == ("/v1/completions", "Once upon a time")
    assert "messages" not in body


def test_the_key_is_asked_for_only_when_needed(server: PageServer, watched: Watched) -> None:
    page = watched.open(server)
    expect(page.locator("#health")).to_have_text("Healthy")
    expect(page.locator("#key-form")).to_be_hidden()
    server.api_key = "secret"
    expect(page.locator("#key-form")).to_be_visible()
    page.get_by_label("This server wants an API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_have_text("The server refused this key.")
    page.get_by_label("This server wants an API key").fill("secret")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#health")).to_have_text("Healthy")
    _ask(page, "Hello")
    expect(page.locator(".turn .text").nth(1)).to_have_text("".join(server.words))
    assert page.evaluate("sessionStorage.getItem('tightkv-api-key')") == "secret"
    assert page.evaluate("localStorage.length") == 0


def test_trouble_has_a_banner(server: PageServer, watched: Watched) -> None:
    page = watched.open(server)
    expect(page.locator("#health")).to_have_text("Healthy")
    expect(page.locator("#banner")).to_be_hidden()
    server.state = state(error="The engine has died (RuntimeError): restart the server.")
    expect(page.locator("#banner")).to_contain_text("The engine has died (RuntimeError)")
    server.status = 500
    expect(page.locator("#banner")).to_contain_text("HTTP 500")
    server.state, server.status = state(), 200
    expect(page.locator("#banner")).to_be_hidden()
    page.context.set_offline(True)
    expect(page.locator("#banner")).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    expect(page.locator("#health")).to_have_text("Healthy")


@pytest.mark.parametrize("width", [360, 390, 768, 1280, 1920])
def test_nothing_is_wider_than_the_window(
    server: PageServer, watched: Watched, width: int, tmp_path: Path
) -> None:
    server.state = state(TWO_KINDS if width == 768 else None, quality=QUALITY)
    watched.page.set_viewport_size({"width": width, "height": 900})
    page = watched.open(server)
    _ask(page, "What is a paged KV cache?")
    expect(page.locator(".turn .meta")).to_contain_text("cached")
    page.screenshot(path=tmp_path / f"page-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert _overlapping(page) == []
    assert watched.console == []


def test_an_engine_with_nothing_to_tell(server: PageServer, watched: Watched) -> None:
    engine = replace(snapshot(pool(1), requests=()), total_bytes=None)
    server.state = state(engine)
    for name in ("prompt_tokens", "generation_tokens", "ttft", "running", "waiting", "kv_usage"):
        server.state["history"][name] = []
    server.state["history"]["ttft_p50"] = None
    page = watched.open(server)
    expect(page.locator("#memory-total")).to_contain_text("does not tell")
    expect(page.locator("#charts")).to_contain_text("no request yet")
    expect(page.locator("#quality-off")).to_contain_text("--kv-quality-sample-rate 0.01")
    assert watched.console == []


def _ask(page: Any, text: str) -> None:
    expect(page.locator("#health")).to_have_text("Healthy")
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def _ending(text: str) -> Any:
    return re.compile(re.escape(text) + "$")


def _places(page: Any) -> Any:
    """x, y, width and height of all cards."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".card:not([hidden])")].map((card) => {
          const box = card.getBoundingClientRect();
          return [box.x, box.y, box.width, box.height];
        })"""
    )


def _overlapping(page: Any) -> Any:
    """Texts of parts whose children lie on one another, and of those that are cut."""
    return page.evaluate(
        """() => {
          const all = (selector) => [...document.querySelectorAll(selector)];
          const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1;
          const crowded = all("header, .head, .row, .facts, .legend, .figures, .bars li, .tile div")
            .filter((parent) => {
              const boxes = [...parent.children].map((node) => node.getBoundingClientRect());
              return boxes.some((a, i) => boxes.slice(i + 1).some((b) => meet(a, b)));
            });
          const cut = all(".tile div, .bars li, .facts div, .head, button, h2, h3")
            .filter((node) => node.scrollWidth > node.clientWidth + 1);
          return [...crowded, ...cut].map((node) => node.textContent);
        }"""
    )
