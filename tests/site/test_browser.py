"""The built site and the page of `explain` in Chromium: nothing missing, nothing from outside, narrow too."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "_build" / "html"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium"),
    pytest.mark.skipif(not SITE.is_dir(), reason="the documentation has not been built: tox run -e docs"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the built documentation, served for as long as the tests here run."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=SITE)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests here."""
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Visit:
    """A page of the browser that remembers what went wrong in it.

    Args:
        browser: what opens it.
        size: of the window, in pixels.
    """

    def __init__(self, browser: Any, size: dict[str, int]) -> None:
        self.page = browser.new_page(viewport=size)
        self.faults: list[str] = []
        self.page.on("console", lambda said: self._told(said.type, said.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("requestfailed", lambda request: self.faults.append(f"not loaded: {request.url}"))
        self.page.on("response", lambda answer: self._answered(answer.status, answer.url))

    def _told(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(text)

    def _answered(self, status: int, address: str) -> None:
        outside = not address.startswith(("http://127.0.0.1", "file://", "data:"))
        if outside or (status >= 400 and not address.endswith("favicon.ico")):
            self.faults.append(f"{status}: {address}")

    def require_sound(self) -> None:
        """Raise unless everything was loaded, every picture is there, and the page is no wider than the window."""
        broken = self.page.evaluate(
            "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        wide = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert (self.faults, broken, max(wide, 0)) == ([], [], 0)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    "name",
    ["index", "start", "muon-in-your-script", "muon-learning-rate", "muon", "configuration", "api/index"],
)
def test_a_page_is_whole_at_every_width(name: str, size: dict[str, int], site: str, browser: Any) -> None:
    """No picture missing, no error in the console, no request to elsewhere, nothing cut off at 390 pixels."""
    visit = Visit(browser, size)
    visit.page.goto(f"{site}/{name}.html", wait_until="load")
    visit.require_sound()
    visit.page.close()


def test_the_front_page_leads_four_kinds_of_readers_on(site: str, browser: Any) -> None:
    """A card each; every link of it opens a page."""
    visit = Visit(browser, WIDE)
    visit.page.goto(f"{site}/index.html")
    cards = visit.page.locator("article .sd-card")
    titles = [text.strip() for text in cards.locator(".sd-card-title").all_inner_texts()]
    assert titles == ["Researcher", "Engineer", "Author", "Contributor"]
    addresses = [link.get_attribute("href") for link in cards.locator("a").all()]
    assert len(addresses) >= 12
    for address in addresses:
        visit.page.goto(f"{site}/{address}")
        assert visit.page.locator("h1").count() == 1
    visit.require_sound()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("learning rate", "Muon's learning rate"),
        ("checkpoint", "Checkpoints"),
        ("muon", "Muon"),
        ("layer-wise", "Layer-wise"),
    ],
)
def test_a_search_finds_the_page_about_it_first(site: str, browser: Any, words: str, page: str) -> None:
    """Before answers, lists and names of the reference that mention the words."""
    visit = Visit(browser, WIDE)
    visit.page.goto(f"{site}/search.html?q={words.replace(' ', '+')}")
    found = visit.page.locator("#search-results li a")
    found.first.wait_for(timeout=300_000)
    titles = [title.replace("\u2019", "'") for title in found.all_inner_texts()[:5]]
    assert titles[0].startswith(page), titles
    assert not any("megaopt_" in title for title in titles)
    visit.require_sound()


def test_formulas_are_drawn_without_a_script(site: str, browser: Any) -> None:
    """The browser lays them out as mathematics, with a height."""
    visit = Visit(browser, WIDE)
    visit.page.goto(f"{site}/muon.html")
    formulas = visit.page.locator("math")
    assert formulas.count() > 5
    assert (formulas.first.bounding_box() or {"height": 0})["height"] > 5
    visit.require_sound()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_page_of_explain_opens_by_itself(size: dict[str, int], browser: Any, tmp_path: Path) -> None:
    """From the file, with its map and its table."""
    target = tmp_path / "explained.html"
    command = [str(Path(sys.executable).with_name("megaopt")), "explain", "model:GPT", "--optimizer", "muon"]
    subprocess.run(
        [*command, "--html", str(target)], cwd=ROOT / "examples" / "nanogpt", check=True, timeout=800
    )
    visit = Visit(browser, size)
    visit.page.goto(target.as_uri())
    assert visit.page.get_by_text("c_attn").count() > 0
    broken = """() => [...document.querySelectorAll("td.name")].flatMap(td => [...td.childNodes]).filter(part => {
        const range = document.createRange();
        range.selectNodeContents(part);
        return range.getClientRects().length > 1;
    }).map(part => part.textContent)"""
    assert visit.page.evaluate(broken) == []  # names break after dots alone
    visit.require_sound()
