"""The documentation as a site: the pages of docs/ and an API reference made from the docstrings, as plain HTML.

    python tools/make_site.py [FOLDER]      (default: site)

Nothing in it is fetched from elsewhere: it can be read from the disk, or served by any web server. Needs the extra
`docs`: pdoc for the reference, markdown-it for the pages.
"""

from __future__ import annotations

import argparse
import html
import importlib
import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What people program against; the rooms below are the package's own.
MODULES = (
    "safari",
    "safari.aggregation",
    "safari.config",
    "safari.data",
    "safari.engine",
    "safari.errors",
    "safari.links",
    "safari.models",
    "safari.pruning",
    "safari.report",
    "safari.runs",
    "safari.tasks",
    "safari.training",
    "safari.wire",
)
NEEDS = {"safari.flower": "flwr", "safari.net": "cryptography"}
# Pages at the top of the repository that the others link to.
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r'(href|src|srcset)="([^"#:]*)(#[^"]*)?"')

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1a1a1a; --soft: #6b6b6b; --line: #ddd; --paper: #fff; --code: #f5f5f5; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --soft: #a0a0a0; --line: #444; --paper: #161616; --code: #222; }} }}
body {{ margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.55 system-ui, sans-serif; }}
nav {{ border-bottom: 1px solid var(--line); padding: .6rem 1.2rem; font-size: .9rem; }}
nav a {{ margin-right: .9rem; white-space: nowrap; }}
main {{ max-width: 54rem; margin: 0 auto; padding: 1rem 1.2rem 4rem; }}
a {{ color: #0072b2; }} @media (prefers-color-scheme: dark) {{ a {{ color: #56b4e9; }} }}
pre, code {{ background: var(--code); font: .875em/1.5 ui-monospace, monospace; border-radius: 3px; }}
code {{ padding: .1em .25em; }} pre {{ padding: .8em 1em; overflow-x: auto; }} pre code {{ padding: 0; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: .92em; }}
th, td {{ border-bottom: 1px solid var(--line); padding: .3em .7em; text-align: left; vertical-align: top; }}
img {{ max-width: 100%; }} blockquote {{ margin-left: 0; padding-left: 1em; border-left: 3px solid var(--line); }}
</style></head><body><nav>{menu}</nav><main>{body}</main></body></html>
"""


def slug(heading: str, seen: list[str]) -> str:
    """The anchor that GitHub gives a heading, so that the pages' links hold here as well."""
    plain = re.sub(r"<[^>]+>", "", html.unescape(heading))
    found = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
    name = f"{found}-{seen.count(found)}" if found in seen else found
    seen.append(found)
    return name


def to_html(text: str) -> str:
    """A page's body, with an anchor for each heading."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    seen: list[str] = []
    return re.sub(
        r"<h([1-6])>(.*?)</h\1>",
        lambda found: f'<h{found[1]} id="{slug(found[2], seen)}">{found[2]}</h{found[1]}>',
        body,
    )


def relinked(body: str, page: Path, out: Path, pages: dict[Path, Path], used: set[Path]) -> str:
    """Links to other pages lead to their HTML; other files of the repository are named, or copied where shown."""

    def replace(match: re.Match[str]) -> str:
        attribute, target, anchor = match[1], match[2], match[3] or ""
        if not target:
            return match[0]
        file = (page.parent / target).resolve()
        if file in pages:
            new = pages[file]
        elif file.is_file():
            used.add(file)
            new = out / "files" / file.relative_to(ROOT)
        else:
            return match[0]
        up = "../" * len(pages[page].relative_to(out).parent.parts)
        return f'{attribute}="{up}{new.relative_to(out).as_posix()}{anchor}"'

    return LINK.sub(replace, body)


def write_pages(out: Path) -> None:
    """docs/ and the pages at the top, as HTML with a menu."""
    sources = [ROOT / name for name in TOP] + sorted((ROOT / "docs").glob("*.md"))
    pages = {source: out / _name(source) for source in sources}
    names = [source for source in sources if source.parent.name == "docs" and source.name != "README.md"]
    used: set[Path] = set()
    for source, target in pages.items():
        up = "../" * len(target.relative_to(out).parent.parts)
        first = (
            (f"{up}index.html", "SAFARI"),
            (f"{up}docs/index.html", "Pages"),
            (f"{up}api/safari.html", "API"),
        )
        rest = [(f"{up}docs/{name.stem}.html", name.stem) for name in names]
        menu = "".join(f'<a href="{href}">{html.escape(text)}</a>' for href, text in (*first, *rest))
        text = source.read_text(encoding="utf-8")
        body = relinked(to_html(text), source, out, pages, used)
        title = re.search(r"^# (.*)$", text, re.MULTILINE)
        target.parent.mkdir(parents=True, exist_ok=True)
        page = PAGE.format(title=html.escape(title[1] if title else source.stem), menu=menu, body=body)
        target.write_text(page, encoding="utf-8")
    for file in used:
        copy = out / "files" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _name(source: Path) -> Path:
    folder = Path("docs") if source.parent.name == "docs" else Path()
    return folder / ("index.html" if source.name == "README.md" else f"{source.stem}.html")


def write_reference(out: Path) -> None:
    """The API reference, from the docstrings of all that is public."""
    import pdoc

    from safari.version import __version__

    found = [name for name, needs in NEEDS.items() if importlib.util.find_spec(needs)]
    for name in ("safari", *found):
        # Names that are loaded when they are first used have to be there.
        module = importlib.import_module(name)
        vars(module).update({public: getattr(module, public) for public in getattr(module, "__all__", ())})
    pdoc.render.configure(docformat="google", footer_text=f"safari {__version__}", search=True)
    # Only what a module offers by name, not every file below it.
    exclude = [f"!{module}\\.\\w+" for module in (*MODULES[1:], *found)]
    pdoc.pdoc(
        *MODULES, *found, *exclude, "!safari\\.(?!" + "|".join(_short(found)) + ").*", output_directory=out
    )


def _short(found: list[str]) -> list[str]:
    return [f"{name.removeprefix('safari.')}$" for name in (*MODULES[1:], *found)]


def main(arguments: list[str] | None = None) -> int:
    """Make the site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "site")
    out = parser.parse_args(arguments).folder.resolve()
    if out.exists() and not (out / "api").is_dir() and any(out.iterdir()):
        print(f"error: {out} is neither empty nor a site that was made before", file=sys.stderr)
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as place:
        made = Path(place) / "site"
        write_pages(made)
        write_reference(made / "api")
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
    print(f"wrote {out}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
