"""notebooks/04_data_parallel.ipynb runs, and its committed outputs are true."""

import pytest

from tests.notebooks.rerun import committed, rerun


@pytest.mark.slow
@pytest.mark.long
def test_outputs_are_true():
    cells = committed("04_data_parallel.ipynb")
    for (source, wanted), got in zip(cells, rerun([source for source, _ in cells]), strict=True):
        assert got == wanted, f"run it again and commit it (make notebooks):\n{source}"
