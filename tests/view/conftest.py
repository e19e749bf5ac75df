from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import safari
from runs.kit import environment
from safari.runs import RunFolder

# Two arms, losses, two groups; done in a moment.
SMALL: dict[str, Any] = {
    "name": "small",
    "rounds": 40,
    "seeds": 2,
    "clients": 6,
    "arms": ["drop", "safari"],
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 1, "batch": 8},
    "uplink": {"name": "bernoulli", "p": [1, 0.4, 0.4]},
    "engine": {"device": "cpu", "threads": 1},
}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run that was really made; nobody may change it."""
    path = tmp_path_factory.mktemp("runs") / "small"
    safari.run(SMALL, path)
    return RunFolder.open(path)


@pytest.fixture(scope="session")
def address(small: RunFolder) -> Iterator[str]:
    """A page about the finished run."""
    with viewing(small.path) as found:
        yield found


@pytest.fixture
def copy(small: RunFolder, tmp_path: Path) -> RunFolder:
    """The same, to be damaged."""
    shutil.copytree(small.path, tmp_path / "copy")
    return RunFolder.open(tmp_path / "copy")


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m safari ARGUMENTS`, stopped at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "safari", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stderr is not None
        child.stderr.close()


@contextmanager
def viewing(*runs: Path, options: tuple[str, ...] = ()) -> Iterator[str]:
    """`safari view RUN...`: the address of its page."""
    pytest.importorskip("uvicorn", reason="the extra 'view' is not installed")
    with process("view", *map(str, runs), "--no-browser", "--port", "0", *options) as child:
        assert child.stderr is not None
        seen = []
        for line in child.stderr:
            seen.append(line)
            if found := re.fullmatch(r"page: (\S+)\n", line):
                yield found[1]
                return
        raise AssertionError(f"safari view ended: {''.join(seen)}")


FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Nothing but this machine can be reached, whatever a page may try.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser, or a skip that says what is missing.

    Not for the whole session: as long as Playwright is there, its event loop counts as running in this thread, and
    tests elsewhere could not use `asyncio.run`.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or set CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        # A fresh profile, thrown away at the end.
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open an address as a new visitor. At the end: no error on the console, no request to elsewhere."""
    contexts, problems, requests = [], [], []

    def open_page(
        address: str, width: int = 1280, height: int = 900, first: str = "top1", **options: Any
    ) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: m.type in ("error", "warning") and problems.append(m.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        drawn(page, first)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    here = ("http://127.0.0.1:", "file:", "data:", "blob:")
    assert [url for url in requests if not url.startswith(here)] == []


def drawn(page: Any, chart: str) -> None:
    """Wait until a chart is drawn."""
    page.locator(f"#card-{chart}").scroll_into_view_if_needed()
    page.wait_for_function(
        "id => { const c = document.querySelector(`#card-${id} canvas`);"
        " return c && c.width > 0 && document.querySelector(`#card-${id} .stage`).ariaLabel; }",
        arg=chart,
        timeout=120_000,  # A chart waits for a free moment of the page, which a busy machine has late.
    )


def records(run: RunFolder, arm: str, seed: int = 0) -> list[dict[str, Any]]:
    """A trial's records, read without any of the code that is tested here."""
    path = run.path / "trials" / arm / f"seed-{seed}" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
