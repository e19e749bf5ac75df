"""The page in a real Chromium, on real runs."""

from __future__ import annotations

import csv
import io
import re
import time
from statistics import fmean, stdev
from urllib.parse import parse_qs
from xml.etree import ElementTree

import pytest

import safari
from safari.config import parse
from safari.runs import RunFolder
from safari.toml import to_toml
from safari.view import write_report
from view.conftest import SMALL, drawn, process, records, viewing


@pytest.fixture(scope="module")
def frozen(small, tmp_path_factory):
    """The same as a file."""
    return write_report([small], tmp_path_factory.mktemp("frozen")).as_uri()


@pytest.fixture(params=["live", "frozen"])
def place(request):
    """The page, served or as a file: whatever it can do, it can do as both."""
    return request.getfixturevalue("address" if request.param == "live" else "frozen")


def state(page):
    hash = page.evaluate("location.hash")
    return {key: value[0] for key, value in parse_qs(hash[1:]).items()}


def settle(page):
    """Let everything that was asked for be drawn."""
    page.wait_for_load_state("networkidle") if page.url.startswith("file:") else None
    page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")


def pixels(page, chart):
    return page.evaluate("id => document.querySelector(`#card-${id} canvas`).toDataURL()", chart)


def last_round(page):
    text = page.locator("#card-top1 .stage").get_attribute("aria-label")
    return max(map(int, re.findall(r"in round (\d+)", text)))


def hover(page, chart, x=0.5, y=0.5):
    stage = page.locator(f"#card-{chart} .stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    page.locator(".tip").wait_for()
    return page.locator(".tip").inner_text()


def test_points_arrive_while_a_run_goes_on(browse, tmp_path):
    run, config = tmp_path / "run", tmp_path / "config.toml"
    config.write_text(to_toml(parse({**SMALL, "rounds": 100_000, "seeds": 1})))
    with process("run", str(config), "--out", str(run), "--quiet") as child:
        wait_for(run / "trials/safari/seed-0/rounds.jsonl", child)
        with viewing(run) as address:
            page = browse(address)
            assert page.locator(".state").inner_text().startswith("running, ")
            first, before = last_round(page), pixels(page, "top1")
            page.wait_for_function(
                "first => [...document.querySelector('#card-top1 .stage').ariaLabel"
                ".matchAll(/in round (\\d+)/g)].some(m => Number(m[1]) > first + 5)",
                arg=first,
            )
            # The words are there before the next frame is drawn, and a few rounds of many may look the same.
            page.wait_for_function(
                "old => document.querySelector('#card-top1 canvas').toDataURL() !== old", arg=before
            )
            # The strip grows too, by increments: the cells are those of the records.
            drawn(page, "arrivals")
            length = page.locator("#card-arrivals .stage").get_attribute("aria-label")
            page.wait_for_function(
                "old => document.querySelector('#card-arrivals .stage').ariaLabel !== old", arg=length
            )
            assert int(page.locator("#round").get_attribute("max")) > first
            assert state(page).get("round") is None, "at its end the slider follows the run"
            page.close()
    assert RunFolder.open(run).trial("safari", 0).records()


def wait_for(path, child):
    while not (path.exists() and path.stat().st_size):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.05)


def test_the_slider_moves_through_the_rounds(browse, place):
    page = browse(place)
    drawn(page, "similarity")
    assert "after round 40" in page.locator("#card-similarity .caption").inner_text()
    before = pixels(page, "similarity"), pixels(page, "stand-ins")
    slider = page.locator("#round")
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.get_by_text("after round 7;").wait_for()
    assert state(page)["round"] == "7"
    page.wait_for_function(
        "old => document.querySelector('#card-similarity canvas').toDataURL() !== old", arg=before[0]
    )
    assert pixels(page, "stand-ins") != before[1]
    assert page.locator("output.round").inner_text() == "7 of 40"
    page.keyboard.press("End")
    assert "round" not in state(page)


def test_hovering_gives_exact_numbers(browse, place, small):
    page = browse(place)
    tip = hover(page, "top1")
    number = int(re.match(r"Round (\d+)", tip)[1])
    for arm in ("drop", "safari"):
        values = [100 * records(small, arm, seed)[number - 1]["top1"] for seed in (0, 1)]
        mean, spread = fmean(values), stdev(values)
        assert f"{arm}\n{shown(mean)} % ± {shown(spread)} %" in tip
    page.mouse.move(5, 5)
    page.locator(".tip").wait_for(state="hidden")


def shown(value):
    """Six figures, as JavaScript writes them."""
    return f"{float(f'{value:.6g}'):g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.6g}"


def test_hovering_the_strip_says_who_stood_in(browse, place, small):
    page = browse(place)
    page.get_by_label("Order").select_option("number")
    drawn(page, "arrivals")
    stage = page.locator("#card-arrivals .stage")
    box = stage.bounding_box()
    lines = records(small, "safari")
    line = next(r for r in lines[10:] if "1" in r["stand_ins"] and len(r["stand_ins"]["1"]) == 1)
    # 58 and 12 pixels are margins; rounds 1 to 40 lie between; client 1 is the second of six rows.
    x = 58 + (line["round"] - 1) / 39 * (box["width"] - 70)
    y = 10 + 1.5 * (box["height"] - 40) / 6
    tip = hover(page, "arrivals", x / box["width"], y / box["height"])
    assert tip.startswith(f"Round {line['round']}, client 1, 20")
    assert f"Z\n\nlost on the way up; client {line['stand_ins']['1'][0]} stood in" in tip
    arrived = sum(1 in r["arrived"] for r in lines)
    assert f"arrived so far\n{arrived} of 40" in tip


# A busy page is told of several changes at once, in their order; here of one more, before each.
SEVERAL_CHANGES = """
    const Real = IntersectionObserver;
    window.IntersectionObserver = class extends Real {
        constructor(listen, options) {
            super((entries, self) => listen([{ isIntersecting: false }, ...entries], self), options);
        }
    };
"""


def test_a_chart_that_has_come_into_sight_is_drawn_whatever_was_before(chromium, place):
    context = chromium.new_context()
    context.add_init_script(SEVERAL_CHANGES)
    page = context.new_page()
    page.goto(place)
    drawn(page, "top1")
    drawn(page, "loss")
    context.close()


def test_charts_can_be_read_with_the_keyboard(browse, place, small):
    page = browse(place)
    drawn(page, "loss")
    page.locator("#card-loss .stage").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    said = page.locator("#live").inner_text()
    mean = fmean(records(small, "drop", seed)[1]["loss"] for seed in (0, 1))
    assert said.startswith("Round 2: ")
    assert f"drop {shown(mean)} ±" in said
    drawn(page, "similarity")
    page.locator("#card-similarity .stage").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert re.match(r"Clients \d and \d: similarity -\d", page.locator("#live").inner_text())
    drawn(page, "stand-ins")
    page.locator("#card-stand-ins .stage").focus()
    page.keyboard.press("ArrowRight")
    assert re.match(r"Client \d: stood in for others \d+ time", page.locator("#live").inner_text())
    page.keyboard.press("Escape")
    page.locator(".tip").wait_for(state="hidden")


def download(page, chart, kind):
    drawn(page, chart)
    page.locator(f"#card-{chart} summary").click()
    with page.expect_download() as found:
        page.locator(f"#card-{chart} .choices").get_by_text(kind, exact=True).click()
    assert found.value.suggested_filename == f"small-{chart}.{kind.lower()}"
    return found.value.path().read_bytes()


def test_the_average_has_a_chart_where_a_run_keeps_one(browse, tmp_path):
    safari.run({**SMALL, "rounds": 6, "seeds": 1, "aggregation": {"average": 0.9}}, tmp_path / "run")
    page = browse(write_report([RunFolder.open(tmp_path / "run")], tmp_path).as_uri())
    drawn(page, "average")
    newest = RunFolder.open(tmp_path / "run").trial("safari", 0).records()[-1]["average"]["top1"]
    text = page.locator("#card-average .stage").get_attribute("aria-label")
    assert f"safari {100 * newest:.6g} % in round 6" in text


CHARTS = ["top1", "top5", "loss", "arrivals", "similarity", "stand-ins", "labels", "time", "bytes-up",
          "bytes-down", "density", "churn", "layer-density", "layer-churn"]  # fmt: skip


def test_every_chart_can_be_downloaded_as_png_svg_and_csv(browse, address):
    page = browse(address)
    shown = page.evaluate("[...document.querySelectorAll('.card:not([hidden])')].map(c => c.id.slice(5))")
    assert shown == CHARTS
    for chart in CHARTS:
        png, svg, table = (download(page, chart, kind) for kind in ("PNG", "SVG", "CSV"))
        assert png.startswith(b"\x89PNG")
        assert int.from_bytes(png[16:20]) >= 1000, "twice the size on the screen"
        drawing = ElementTree.fromstring(svg)
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(drawing.iter())) > 10
        rows = list(csv.reader(io.StringIO(table.decode())))
        assert len(rows) > 1
        assert {len(row) for row in rows} == {len(rows[0])}


def test_a_downloaded_table_holds_the_records(browse, place, small):
    page = browse(place)
    rows = list(csv.DictReader(io.StringIO(download(page, "top1", "CSV").decode())))
    expected = [fmean(records(small, "safari", s)[t]["top1"] for s in (0, 1)) for t in range(40)]
    found = [float(row["mean"]) for row in rows if row["arm"] == "safari"]
    assert found == pytest.approx(expected, abs=1e-12)
    cells = list(csv.DictReader(io.StringIO(download(page, "arrivals", "CSV").decode())))
    for record in records(small, "safari"):
        mine = [cell for cell in cells if cell["round"] == str(record["round"])]
        assert [int(c["client"]) for c in mine if c["status"] == "arrived"] == record["arrived"]
        assert {c["client"]: int(c["stand-in"]) for c in mine if c["stand-in"]} == {
            client: who[0] for client, who in record["stand_ins"].items()
        }


def test_themes_switch_and_are_remembered_in_the_address(browse, place):
    page = browse(place, color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light, drawing = page.evaluate(colour), pixels(page, "top1")
    page.get_by_label("Colours").select_option("dark")
    page.wait_for_function(f"old => {colour} !== old", arg=light)
    page.wait_for_function(
        "old => document.querySelector('#card-top1 canvas').toDataURL() !== old", arg=drawing
    )
    assert state(page)["theme"] == "dark"
    dark = page.evaluate(colour)
    page.reload()
    drawn(page, "top1")
    assert page.evaluate(colour) == dark
    page.get_by_label("Colours").select_option("auto")
    assert page.evaluate(colour) == light
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"dark => {colour} === dark", arg=dark)


def test_the_address_shows_a_colleague_the_same_view(browse, place):
    page = browse(place)
    page.locator(".tile", has_text="drop").click()
    page.get_by_label("First round on the axes").fill("5")
    page.get_by_label("First round on the axes").press("Enter")
    page.get_by_label("Last round on the axes").fill("30")
    page.get_by_label("Last round on the axes").press("Enter")
    page.get_by_label("Arm and seed").select_option("safari, seed 1")
    page.get_by_label("Stand-ins of").select_option("last")
    drawn(page, "similarity")
    page.locator("#round").evaluate(
        "slider => { slider.value = 21; slider.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    page.get_by_text("after round 21;").wait_for()
    charts = ("top1", "arrivals", "similarity", "stand-ins")
    for chart in charts:
        drawn(page, chart)
    settle(page)
    page.mouse.move(2, 2)
    shown_here = {chart: pixels(page, chart) for chart in charts}
    assert state(page) == {
        "off": "0/drop", "span": "5-30", "trial": "0/safari/1", "round": "21", "window": "last",
    }  # fmt: skip
    other = browse(page.evaluate("location.href"))
    drawn(other, "similarity")
    other.get_by_text("after round 21;").wait_for()
    for chart in charts:
        drawn(other, chart)
        other.wait_for_function(
            "([id, data]) => document.querySelector(`#card-${id} canvas`).toDataURL() === data",
            arg=[chart, shown_here[chart]],
        )
    assert other.locator(".tile", has_text="drop").get_attribute("aria-pressed") == "false"
    assert other.locator("output.round").inner_text() == "21 of 40"
    other.get_by_role("button", name="All rounds").click()
    assert "span" not in state(other)


def test_dragging_zooms_and_a_double_click_zooms_out(browse, address):
    page = browse(address)
    box = page.locator("#card-top1 .stage").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=4)
    page.mouse.up()
    first, last = map(int, state(page)["span"].split("-"))
    assert 8 <= first < last <= 28
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], y)
    assert "span" not in state(page)


def test_an_address_with_nonsense_in_it_shows_the_page(browse, address):
    page = browse(f"{address}#span=9-3&round=x&trial=nobody&theme=<b>&off=&window=%00&order[]=1")
    assert page.locator("output.round").inner_text() == "40, the newest"
    drawn(page, "arrivals")


def test_several_runs_are_overlaid_and_their_differences_shown(browse, small, tmp_path):
    settings = {**SMALL, "name": "other", "rounds": 20, "seeds": 1, "pruning": {"sparsity": 0.5}}
    safari.run(settings, tmp_path / "other")
    with viewing(small.path, tmp_path / "other") as address:
        page = browse(address)
        names = [text.split("\n")[0] for text in page.locator(".tile").all_inner_texts()]
        assert names == ["small/drop", "small/safari", "other/drop", "other/safari"]
        table = page.get_by_label("Differences between the configs")
        assert [text.split("\t") for text in table.inner_text().splitlines()] == [
            ["field", "small", "other"], ["seeds", "2", "1"], ["rounds", "40", "20"],
            ["pruning.sparsity", "0.8", "0.5"],
        ]  # fmt: skip
        tip = hover(page, "top1", x=0.3)
        assert all(name in tip for name in names)
        page.close()


def test_an_event_that_cannot_be_taken_is_named_and_the_page_goes_on(chromium, copy):
    """Without `browse`: the browser's console is expected to hold an error here."""
    from view.test_server import served

    with served([copy]) as address:
        context = chromium.new_context()
        page = context.new_page()
        # The stream of a server that once says something that is no JSON.
        spoil = (
            "window.EventSource = class extends EventSource { addEventListener(kind, f) {"
            " super.addEventListener(kind, (e) => { if (kind === 'table' && !window.spoilt) {"
            " window.spoilt = true; f({data: '{'}); } f(e); }); } };"
        )
        page.add_init_script(spoil)
        page.goto(address)
        drawn(page, "top1")
        note = "This page could not take some news: table: SyntaxError"
        page.locator("#notes").get_by_text(note).wait_for()
        trial = copy.trial("safari", 0)
        line = trial.rounds.read_text().splitlines()[-1].replace('"round": 40', '"round": 41')
        with trial.rounds.open("a") as file:
            file.write(line + "\n")
        page.wait_for_function(
            "() => document.querySelector('#card-top1 .stage').ariaLabel.includes('in round 41')"
        )
        context.close()


def test_a_chart_that_fails_leaves_the_others_alone(chromium, address):
    context = chromium.new_context()
    page = context.new_page()
    # Layers are drawn as images of numbers: this one is spoilt, whatever is in it.
    page.add_init_script(
        "const read = Response.prototype.json; Response.prototype.json = async function () {"
        " const value = await read.call(this); if (value.layers) value.layers = null; return value; };"
    )
    page.goto(address)
    drawn(page, "top1")
    card = page.locator("#card-layer-density .blank")
    card.scroll_into_view_if_needed()
    page.get_by_text("This chart cannot be drawn: TypeError").first.wait_for()
    drawn(page, "churn")
    context.close()


def test_metrics_of_another_task_and_a_dead_layer(browse, tmp_path):
    from report.test_metrics import run_of, spoken
    from safari.tasks import tokens

    layers = {"layers": {"0.weight": 0.5, "1.weight": 0.0}, "layer_churn": {"0.weight": 0.8}}
    lines = [{**scores, **layers} for scores in spoken(400.0, 60.0, 30.0, 25.5)]
    run = run_of(tmp_path, tokens(), *lines, name="letters")
    page = browse(write_report([run], tmp_path / "report.html").as_uri(), first="perplexity")
    assert page.locator("#card-perplexity h3").inner_text() == "Perplexity"
    assert page.locator(".tile .big").inner_text() == "25.5"
    assert "loss 3.239" in page.locator(".tile .small").inner_text()
    assert page.locator("#scores h3:visible").all_inner_texts() == ["Perplexity", "Token accuracy", "Loss"]
    assert (
        page.get_by_text("letters, drop, seed 0: layer 1.weight is dead, all of its weights are cut").count()
        == 1
    )
    drawn(page, "layer-density")
    assert page.locator("#card-layer-density .legend").inner_text() == "dead: nothing of the layer is left"
    label = page.locator("#card-layer-density .stage").get_attribute("aria-label")
    assert "0.weight 50 %; 1.weight 0 %: dead, nothing of it is left" in label
    # Of the half that is kept, four fifths are cut and grown elsewhere in a round: 0.5 / 0.4.
    drawn(page, "layer-life")
    assert "0.weight 1.25 rounds; 1.weight –" in page.locator("#card-layer-life .stage").get_attribute(
        "aria-label"
    )
