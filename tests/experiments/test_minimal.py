"""The smallest experiment runs, learns, and stays small."""

from pathlib import Path

from experiments import minimal


def test_it_learns(capsys):
    assert minimal.main(steps=60) < 3.3  # 4.17 is chance
    assert capsys.readouterr().out.startswith("step 1: 4.1")


def test_it_is_small():
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 40
