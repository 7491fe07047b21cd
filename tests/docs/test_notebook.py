"""The notebook runs from above to below, in a kernel of its own."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from support import ROOT

PATH = ROOT / "examples/dflash.ipynb"


def test_it_is_committed_without_outputs():
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)


@pytest.mark.slow
@pytest.mark.network
def test_it_runs(tmp_path):
    book = nbformat.read(PATH, as_version=4)
    (settings,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
    settings.source += f"\nPROMPTS, EPOCHS = 12, 1\nOUT = {str(tmp_path)!r}"
    NotebookClient(book, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    said = "".join(part.get("text", "") for cell in book.cells for part in cell.get("outputs", ()))
    assert "same text" in said and "trained here:" in said
