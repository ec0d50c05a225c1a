"""Subclasses of numpy's arrays have more than their elements, which a checkpoint would lose: refused by name."""

import numpy as np
import pytest

from fmegatron import checkpoint


class Metres(np.ndarray):
    """An array with a unit."""


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (
            np.ma.array([1.0, -999.0], mask=[False, True]),
            r"state/x: got a MaskedArray, .* pass x.data and x.mask as two",
        ),
        (np.arange(3.0).view(Metres), r"state/x: got a Metres, .* pass np.asarray\(x\)"),
        (np.rec.array([(1.0,)], dtype=[("a", "f8")]), "state/x: got a recarray"),
    ],
)
def test_a_subclass_is_refused(tmp_path, x, words):
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path / "a", {"state": {"x": x}})
    assert not (tmp_path / "a").exists()
    checkpoint.save(tmp_path / "b", {"state": {"x": np.arange(3.0)}})
    if x.dtype.names is None:
        with pytest.raises(ValueError, match=words):
            checkpoint.restore(tmp_path / "b", {"state": {"x": x}})


def test_a_mapped_file_is_an_array(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(5.0))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    checkpoint.save(tmp_path / "a", {"x": x})
    assert checkpoint.restore(tmp_path / "a")["x"].tolist() == [0, 1, 2, 3, 4]
