"""notebooks/05_bench.ipynb runs in a kernel, with engines and magics, and its committed outputs are true."""

import re

import nbclient
import nbformat
import pytest

from tests.house import ROOT

PATH = ROOT / "notebooks" / "05_bench.ipynb"
LOSS = re.compile(r"^ +(\d+) +(\d\.\d{4}) .*", re.M)  # of the table: step, loss, and what depends on the machine


def said(notebook):
    """(source, numbers of losses, other text) of each code cell, without what another run gives otherwise."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            errors = [output.get("name") == "stderr" for output in cell.outputs]  # progress of what takes long
            texts = [text for text, error in zip(texts, errors, strict=True) if not error and "[stderr:" not in text]
            pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
            text = "\n".join(
                sorted(text.strip() for text in texts if text.partition("]")[2].strip() or "]" not in text)
            )
            losses = [float(loss) for _, loss in LOSS.findall(text)]
            text = re.sub(r"\d+\.\d s\b|.*(save_seconds|with compiling; peak).*\n?", "", LOSS.sub(r"\1", text))
            text = re.sub(r"\.py:\d+\b", ".py", text)  # lines of sources move
            yield cell.source, losses, (text.split(), pictures)


@pytest.mark.slow
@pytest.mark.long
def test_outputs_are_true(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    wanted = nbformat.read(PATH, 4)
    ran = nbclient.NotebookClient(
        nbformat.read(PATH, 4), timeout=600, kernel_name="python3", resources={"metadata": {"path": str(PATH.parent)}}
    ).execute()
    for (source, losses, text), (_, want_losses, want_text) in zip(said(ran), said(wanted), strict=True):
        assert text == want_text, f"run it again and commit it (make notebooks):\n{source}"
        assert losses == pytest.approx(want_losses, abs=0.1), source
    assert sum(len(losses) for _, losses, _ in said(wanted)) == 10
