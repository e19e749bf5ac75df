from __future__ import annotations

import io

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from report.made_up import record
from safari.report import cells, explain, rows_of, to_markdown, to_rich, to_text
from safari.report.table import human_bytes
from safari.runs import summarise

EVALUATION = {"evaluation": {"last": 2, "target": 0.85}}


def trial(*top1, **changes):
    return [record(i + 1, top1=value, **changes) for i, value in enumerate(top1)]


def two_seeds(synthetic, **options):
    return synthetic(
        {
            ("drop", 0): trial(0.1, 0.2, 0.60, 0.70),  # last two: 0.65
            ("drop", 1): trial(0.1, 0.9, 0.80, 0.90),  # last two: 0.85; the target in round 2
            ("safari", 0): trial(0.1, 0.2, 0.90, 0.90, bytes={"up": 1000, "down": 500_000}),
            ("safari", 1): trial(0.1, 0.2, 0.30, 0.90, bytes={"up": 1000, "down": 500_000}),
        },
        {"seeds": 2, **EVALUATION},
        **options,
    )


def test_numbers_by_hand(synthetic):
    header, body = cells(rows_of({"demo": summarise(two_seeds(synthetic))}))
    assert header == [
        "arm", "top-1 %", "top-5 %", "loss", "rounds to 85 %", "to stay there", "lost %", "up", "down",
        "seeds",
    ]  # fmt: skip
    # Sample standard deviation of 65 and 85: 14.1; of 90 and 60: 21.2. One of three clients is missing.
    assert body == [
        ["drop", "75.0 ± 14.1", "75.0 ± 0.0", "2.000 ± 0.000", "2 (1 of 2)",
         "4 (1 of 2)", "33.3", "–", "–", "2"],
        ["safari", "75.0 ± 21.2", "75.0 ± 0.0", "2.000 ± 0.000", "4 ± 1 (2 of 2)",
         "4 ± 1 (2 of 2)", "33.3",
         "1.00 kB", "500 kB", "2"],
    ]  # fmt: skip


def test_the_average_has_columns_where_a_run_keeps_one(synthetic):
    # What no trend and no alternation explains: k, 0, -2k, 0, k with k = 0.1, on two degrees of freedom.
    scores = [{"top1": v, "top5": 1.0, "loss": 1.0} for v in (0.1, 0.7, 0.6, 0.4, 0.6, 0.7)]
    run = synthetic(
        {("drop", 0): [record(t, average=found) for t, found in enumerate(scores, 1)]},
        {"rounds": 6, "evaluation": {"last": 5}},
    )
    summary = summarise(run)
    header, body = cells(rows_of({"demo": summary}))
    assert header[:5] == ["arm", "top-1 %", "wobble", "average %", "its wobble"]
    assert [line[:5] for line in body] == [["drop", "50.0", "0.0", "60.0", "17.3"], ["safari", *["–"] * 4]]
    assert explain({"demo": summary}).endswith("Average: top-1 of the running average of the global models.")


def test_what_was_refused_has_a_column_where_anything_was(synthetic):
    run = synthetic({("drop", 0): trial(0.5, 0.5, refused={"2": "NaN"}), ("safari", 0): trial(0.5, 0.5)})
    header, body = cells(rows_of({"demo": summarise(run)}))
    assert [line[header.index("refused")] for line in body] == ["2", "–"]


def test_one_seed_has_no_spread_and_unused_columns_go(synthetic):
    run = synthetic({("drop", 0): trial(0.5, 0.5, 0.5, 0.5)}, {"arms": ["drop"], **EVALUATION})
    header, body = cells(rows_of({"demo": summarise(run)}))
    assert "up" not in header
    assert "progress" not in header
    assert body == [["drop", "50.0", "75.0", "2.000", "– (0 of 1)", "– (0 of 1)", "33.3", "1"]]


def test_an_unfinished_run_says_how_far_it_is(synthetic):
    run = synthetic({("drop", 0): trial(0.5, 0.5)}, EVALUATION)
    header, body = cells(rows_of({"demo": summarise(run)}))
    assert [line[header.index("progress")] for line in body] == ["2 of 4 rounds", "not begun"]
    assert [line[header.index("lost %")] for line in body] == ["33.3", "–"]
    assert [line[header.index("top-1 %")] for line in body] == ["50.0", "–"]


def test_progress_counts_seeds_that_have_not_begun(synthetic):
    run = synthetic(
        {("drop", 0): trial(*[0.5] * 4), ("drop", 1): trial(0.5, 0.5)}, {"seeds": 3, **EVALUATION}
    )
    header, body = cells(rows_of({"demo": summarise(run)}))
    assert [line[header.index("progress")] for line in body] == ["6 of 12 rounds", "not begun"]


def test_several_runs_carry_their_names_and_targets(synthetic):
    one = summarise(two_seeds(synthetic, folder="one"))
    other = {**one, "target": 0.9}
    header, body = cells(rows_of({"one": one, "other": other}))
    assert [line[0] for line in body] == ["one/drop", "one/safari", "other/drop", "other/safari"]
    column = header.index("rounds to target")
    assert body[0][column] == "85 %: 2 (1 of 2)"
    assert body[2][column] == "90 %: 2 (1 of 2)"


def test_text_is_in_line(synthetic):
    lines = to_text(rows_of({"demo": summarise(two_seeds(synthetic))})).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("drop  ")


def test_markdown_escapes_bars(synthetic):
    rows = rows_of(
        {"demo": summarise(two_seeds(synthetic)), "a|b": summarise(two_seeds(synthetic, folder="2"))}
    )
    lines = to_markdown(rows).splitlines()
    assert lines[1].startswith("|---|---:|")
    assert "| a\\|b/drop |" in lines[4]


def printed(table, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_terminal_table_fits_and_keeps_the_arm(synthetic):
    rows = rows_of({"demo": summarise(two_seeds(synthetic))})
    wide, narrow = printed(to_rich(rows, "demo", 200), 200), printed(to_rich(rows, "demo", 60), 60)
    assert "top-5 %" in wide
    assert "top-5 %" not in narrow
    for text in (wide, narrow):
        assert "drop" in text
        assert "75.0 ± 14.1" in text
        assert "…" not in text


def test_names_are_not_markup(synthetic):
    rows = rows_of(
        {"[red]x": summarise(two_seeds(synthetic)), "y": summarise(two_seeds(synthetic, folder="2"))}
    )
    assert "[red]x/drop" in printed(to_rich(rows, "[bold]t"), 200)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=0, max_value=10**17))
def test_bytes_are_within_half_a_percent(count):
    number, unit = human_bytes(count).split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}[unit]
    assert abs(float(number) * factor - count) <= 0.005 * count + 0.5
    assert len(number) <= 4
