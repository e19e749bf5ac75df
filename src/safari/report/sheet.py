"""The style sheet of a page of figures: light and dark, screen, phone and paper."""

from __future__ import annotations

from safari.report.style import GRID, INK, PALETTE, SOFT

_LIGHT = {"--paper": "#ffffff", "--ink": INK, "--soft": SOFT, "--grid": GRID, "--link": "#0072b2"} | {
    f"--line-{k}": shade for k, shade in enumerate(PALETTE) if k > 0
}
# The same hues, lighter, so that lines and text keep their contrast on a dark page.
_DARK = {
    "--paper": "#16181c",
    "--ink": "#ececec",
    "--soft": "#a3a3a3",
    "--grid": "#33363c",
    "--link": "#56b4e9",
    "--line-1": "#f0803c",
    "--line-2": "#4aa3df",
    "--line-3": "#2cc295",
    "--line-4": "#dd9cc0",
    "--line-5": "#f0b429",
    "--line-6": "#8fd0f5",
}


def _variables(values: dict[str, str]) -> str:
    return " ".join(f"{name}: {value};" for name, value in values.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}
@media print {{ :root {{ {_variables(_LIGHT)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 70rem; margin: 0 auto; padding: 2rem 1rem 3rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.4rem 0 .8rem; }}
header p {{ margin: .2rem 0; color: var(--soft); }}
.note, figcaption, footer {{ color: var(--soft); font-size: .875rem; }}
.note {{ max-width: 46rem; }}
figcaption b {{ color: var(--ink); margin-right: .4em; }}
.missing {{ border-left: 3px solid var(--line-1); padding: .4rem .8rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9375rem; }}
th, td {{ padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: baseline; }}
thead th {{ font-weight: 600; border-bottom: 1px solid var(--soft); white-space: nowrap; }}
tbody tr + tr > * {{ border-top: 1px solid var(--grid); }}
.numbers th {{ white-space: nowrap; }}
.numbers td, .numbers thead th:not(:first-child) {{ text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; padding: .35rem 0 .35rem 1.4rem; }}
.grid {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr));
  gap: 2rem 2.5rem; align-items: start; }}
figure {{ margin: 0; min-width: 0; }}
figure.wide {{ grid-column: 1 / -1; }}
figcaption {{ margin-bottom: .5rem; }}
svg {{ display: block; width: 100%; max-width: var(--natural); height: auto; }}
svg * {{ stroke-linejoin: round; stroke-linecap: butt; }}
details {{ margin-top: 1.6rem; border-top: 1px solid var(--grid); padding-top: .8rem; }}
summary {{ cursor: pointer; font-weight: 600; }}
details > :not(summary) {{ margin-top: 1rem; }}
pre {{ overflow-x: auto; margin: 0; font-size: .8125rem; line-height: 1.45; }}
code {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
footer {{ margin-top: 3rem; }}
@media (max-width: 48rem) {{
  .grid {{ grid-template-columns: minmax(0, 1fr); }}
  figure.wide svg {{ min-width: 36rem; }}
}}
"""
