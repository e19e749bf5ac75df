"""The example notebooks work as they are: cell by cell in this process, and, slowly, in a real kernel.

They are stored without outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_notebook_is_whole_and_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if "outputs" in cell)


def test_the_cells_of_your_own_parts_run(tmp_path, monkeypatch, capsys):
    book = nbformat.read(FOLDER / "your_own_parts.ipynb", as_version=4)
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    for number, cell in enumerate(book.cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"cell {number}", "exec"), vars(module))
    shown = capsys.readouterr().out
    assert "careful" in shown
    assert "did you mean 'rest'" in shown
    assert (tmp_path / "runs/own/report.html").exists()
    assert not (tmp_path / "runs/wrong").exists()


def executed(name, folder):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(FOLDER / name, as_version=4)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=str(folder))
    return book


def output_of(book, words, kind="text/html"):
    """What the first cell with some words in it shows."""
    cell = next(cell for cell in book.cells if cell.cell_type == "code" and words in cell.source)
    return "".join(output.get("data", {}).get(kind, "") for output in cell.outputs)


@pytest.mark.slow
def test_your_own_parts_in_a_kernel(tmp_path):
    shown = output_of(executed("your_own_parts.ipynb", tmp_path), "summary = safari.run")
    assert shown.startswith("<div>run folder: runs/own</div><svg ")
    assert shown.count("round 12/12") == 3


@pytest.mark.slow
def test_first_run_in_a_kernel(tmp_path):
    book = executed("first_run.ipynb", tmp_path)
    assert output_of(book, "summary = safari.run").count("round 30/30") == 4
    assert "<td>safari+</td>" in output_of(book, 'safari.load("runs/first")')
    assert output_of(book, 'run.figure("top1")', "image/png")
    assert (tmp_path / "runs/first/report.html").exists()
