"""notebooks/03_checkpoints.ipynb runs, and its committed outputs are true."""

from tests.notebooks.rerun import committed, rerun
from tests.pairs import one_of_the_day


@one_of_the_day("checkpoints notebook")
def test_outputs_are_true():
    cells = committed("03_checkpoints.ipynb")
    for (source, wanted), got in zip(cells, rerun([source for source, _ in cells]), strict=True):
        assert got == wanted, f"run it again and commit it (make notebooks):\n{source}"
