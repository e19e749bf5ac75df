"""The page for everybody: axe-core finds nothing, light and dark, wide and narrow; no text is too small."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from safari.config import Arm, Config, Plug
from safari.runs import RunFolder
from safari.view import write_report
from view.conftest import drawn
from view.made_up import record


@pytest.fixture(scope="module")
def axe():
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(page, axe):
    """What axe-core finds wrong, all of its rules for WCAG 2.2 A and AA and its best practices."""
    # Cards are drawn when they come into view: let all of them.
    page.set_viewport_size({"width": page.viewport_size["width"], "height": 6000})
    for chart in ("arrivals", "layer-churn"):
        drawn(page, chart)
    # Evaluated by the debugger: the page's own policy would not let a script in.
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [(v["id"], [node["html"] for node in v["nodes"]][:3]) for v in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browse, address, axe, scheme, width):
    page = browse(address, width=width, color_scheme=scheme)
    page.locator(".config summary").click()
    assert violations(page, axe) == []


def test_axe_finds_nothing_in_the_frozen_page(browse, small, axe, tmp_path):
    page = browse(write_report([small], tmp_path).as_uri())
    page.locator(".tile").first.click()
    page.locator("#card-top1 summary").click()
    assert violations(page, axe) == []


def test_a_phone_scrolls_one_way_and_no_text_is_small(browse, small, tmp_path):
    page = browse(write_report([small], tmp_path).as_uri(), width=390, height=844, device_scale_factor=2)
    drawn(page, "layer-churn")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    sizes = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && [...e.childNodes]"
        ".some(n => n.nodeType === 3 && n.data.trim())).map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    targets = page.evaluate(
        "[...document.querySelectorAll('button, select, summary, input')].filter(e => e.checkVisibility())"
        ".map(e => Math.min(e.getBoundingClientRect().width, e.getBoundingClientRect().height))"
    )
    assert min(targets) >= 24, "WCAG 2.2, target size"


HOSTILE = "\"><img src=x onerror=\"document.title='owned'\">'</script><script>document.title='owned'</script>"


@pytest.mark.parametrize("way", ["live", "frozen"])
def test_nothing_from_a_run_becomes_markup(browse, tmp_path, way):
    config = Config(
        name=HOSTILE, rounds=2, clients=3, seed=0,
        arms=(Arm(HOSTILE.replace("/", "∕"), Plug(HOSTILE, {"<b>": "<i>"})),), data=Plug(HOSTILE),
    )  # fmt: skip
    run = RunFolder(tmp_path / "run", config)
    run.path.mkdir()
    trial = run.trial(config.arms[0].name, 0)
    for number in (1, 2):
        trial.append(record(number, layers={HOSTILE: 0.5}, layer_churn={HOSTILE: 0.1}), {HOSTILE: 0.1})
    trial.rounds.open("a").write(f'"{HOSTILE[2:]}"\n')
    (run.path / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run.path / "clients.json").write_text(json.dumps({"label_counts": [[1, 2]] * 3}))
    page_of = write_report([run], tmp_path / "report.html", {HOSTILE: HOSTILE})
    if way == "frozen":
        page = browse(page_of.as_uri())
    else:
        from view.test_server import served

        with served([run], rules={HOSTILE: HOSTILE}) as address:
            page = browse(address)
            look(page)
            page.close()
        return
    look(page)


def look(page):
    assert HOSTILE in page.locator("h1").inner_text()
    assert page.title().startswith(HOSTILE[:20])
    assert page.evaluate("document.querySelectorAll('img, i, b:not(.tip b)').length") == 0
    assert page.evaluate("document.querySelectorAll('script:not([type])').length") == 0
    page.locator("#card-layer-density").scroll_into_view_if_needed()
    drawn(page, "layer-density")
    assert page.title() != "owned"
    page.locator("#card-layer-density summary").click()
    with page.expect_download() as found:
        page.locator("#card-layer-density .choices").get_by_text("CSV").click()
    assert HOSTILE.replace('"', '""') in found.value.path().read_text()
