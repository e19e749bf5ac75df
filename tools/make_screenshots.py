"""Take the page's pictures again: docs/images/view-*.png.

python tools/make_screenshots.py [RUN]     needs playwright and Chromium; without RUN, a demo is run first
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from safari.runs import RunFolder
from safari.view import write_report

IMAGES = Path(__file__).parent.parent / "docs" / "images"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

# name: width, height, pixels a point, colours, where the page is scrolled to
SHOTS = {
    "view-light": (1440, 1030, 1.5, "light", None),
    "view-dark": (1440, 1030, 1.5, "dark", None),
    "view-clients-light": (1440, 1070, 1.5, "light", "#client-controls"),
    "view-clients-dark": (1440, 1070, 1.5, "dark", "#client-controls"),
    "view-phone": (390, 844, 2, "light", None),
    "view-phone-clients": (390, 844, 2, "light", "#card-arrivals"),
}


def take(page: Path, out: Path) -> None:
    """All pictures of a frozen page."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if browser is None:
        raise SystemExit("there is no Chromium: apt-get install chromium, or set CHROMIUM to its path")
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        for name, shot in SHOTS.items():
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                _take(playwright, browser, folder, page, out / f"{name}.png", *shot)
            print(f"wrote {out / name}.png")


def _take(
    playwright: Any, browser: str, folder: str, page: Path, out: Path,
    width: int, height: int, scale: float, scheme: str, target: str | None,
) -> None:  # fmt: skip
    context = playwright.chromium.launch_persistent_context(
        folder,
        executable_path=browser,
        args=FLAGS,
        headless=True,
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme=scheme,
    )
    tab = context.pages[0]
    tab.goto(page.as_uri())
    tab.wait_for_function("() => document.querySelector('#card-top1 .stage').ariaLabel")
    if target is not None:
        tab.evaluate(
            "selector => { const node = document.querySelector(selector);"
            " scrollTo(0, node.getBoundingClientRect().top + scrollY - 12); }",
            target,
        )
    # Cards are drawn when they come into view, and their places settle.
    tab.wait_for_timeout(1000)
    tab.screenshot(path=out)
    context.close()


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description="Take the pictures of the page in docs/images.")
    parser.add_argument("run", type=Path, nargs="?", help="a run to show; without it, the demo is run first")
    given = parser.parse_args().run
    with tempfile.TemporaryDirectory() as folder:
        if given is None:
            import safari

            given = Path(folder) / "demo"
            safari.run({"name": "digits", "seeds": 3}, given)
        take(write_report([RunFolder.open(given)], Path(folder) / "report.html"), IMAGES)


if __name__ == "__main__":
    main()
