"""notebooks/02_train_step.ipynb runs, and its committed outputs are true."""

import pytest

from tests.notebooks.rerun import committed, rerun


@pytest.mark.long
def test_outputs_are_true():
    cells = committed("02_train_step.ipynb")
    for (source, wanted), got in zip(cells, rerun([source for source, _ in cells]), strict=True):
        assert got == wanted, f"run it again and commit it (make notebooks):\n{source}"
