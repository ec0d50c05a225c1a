"""Records reach the table and the file; a resume leaves no step twice."""

import os
import sys

import pytest

from fmegatron.loop import JsonLines, Loggers, json_lines, plot_loss
from fmegatron.loop import read_metrics as read
from fmegatron.loop.loggers import Table, progress
from fmegatron.loop.training import StepInfo


def write(path, steps, after=0, **values):
    with Loggers(JsonLines(path, after=after, mesh="tp2")) as log:
        for step in steps:
            log(step, {"loss": 1.0 / step, **values})


def test_a_resume_leaves_no_step_twice(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5])
    path.write_text(path.read_text() + '{"step": 6, "lo')  # torn by a crash
    write(path, [4, 5, 6], after=3)
    records = read(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["run"] for record in records] == [0, 0, 0, 1, 1, 1]
    assert records[0]["mesh"] == "tp2" and records[0]["loss"] == 1.0
    write(path, [1])
    assert [record["step"] for record in read(path)] == [1]  # from the start: nothing of the old run is left
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_writes_nothing_leaves_the_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with Loggers(JsonLines(path), active=False) as log:
        log(1, {"loss": 0.0})
    with Loggers(JsonLines(path)):
        pass
    assert [record["step"] for record in read(path)] == [1, 2]


def test_lines_that_are_no_records_are_named_and_cost_no_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n[1]\n{"step": NaN}\n{"step": "3"}\n{"step": 4}\n')
    with pytest.warns(RuntimeWarning, match="metrics.jsonl:2, 4, 5, 6: got no record"):
        assert [record["step"] for record in read(path)] == [1, 2, 4]


def test_files_without_an_end_are_not_read(tmp_path, monkeypatch):
    """A device or a pipe in the place of a file of the run; and of a line without an end no more is held."""
    device, pipe, path = tmp_path / "device", tmp_path / "pipe", tmp_path / "metrics.jsonl"
    device.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    for odd in (device, pipe):
        with pytest.raises(OSError, match="is no regular file"):
            read(odd)
        with pytest.warns(RuntimeWarning, match=f"JsonLines of .*{odd.name}"):
            write(odd, [1])
    monkeypatch.setattr(json_lines, "_LONGEST", 64)
    path.write_text('{"step": 1}\n{"step": 2, "x": "' + 200 * "a" + '"}\n{"step": 3}\n' + 5000 * "\0")
    with pytest.warns(RuntimeWarning, match="metrics.jsonl:2: got no record"):
        assert [record["step"] for record in read(path)] == [1, 3]


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\nyou\n")
    with pytest.raises(ValueError, match="notes.txt:1: got no line that is a record"):
        read(path)
    with pytest.warns(RuntimeWarning, match="JsonLines of .*notes.txt.*got no line that is a record"):
        write(path, [1])
    assert path.read_text() == "hello\nyou\n"  # and it is not written over


def test_table(capsys):
    with Loggers(Table()) as log:
        log(0, {"heldout_loss": 1.5})
        log(1, {"loss": 2.0, "tokens": 4096.0, "learning_rate": 3e-4, "tokens_per_second": 1234.5})
        log(10, {"heldout_loss": 1.25})
        log(20, {"loss": float("nan"), "learning_rate": 0.0, "tokens_per_second": 9.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["0", "heldout_loss", "1.5000"]
    assert lines[1].split() == ["step", "loss", "lr", "tokens/s"]
    assert lines[2].split() == ["1", "2.0000", "0.0003", "1,234"]
    assert lines[3].split() == ["10", "heldout_loss", "1.2500"]
    assert lines[4].split() == ["20", "nan", "0", "9"]
    assert len(lines[1]) == len(lines[2])


def test_progress_without_a_terminal_only_hands_on():
    infos = [StepInfo(1, None, {}), StepInfo(2, None, {})]
    assert list(progress(infos, 2)) == infos


def test_progress_on_a_terminal(monkeypatch):
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text
            return len(text)

        def flush(self):
            pass

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    infos = [StepInfo(1, None, {}), StepInfo(2, None, {})]
    assert list(progress(infos, 2)) == infos
    assert "training" in terminal.text and "2/2" in terminal.text


def test_plot(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    write(path, [3, 4], after=2)
    with Loggers(JsonLines(path, after=4)) as log:
        log(4, {"heldout_loss": 0.5})
    plot_loss(path, tmp_path / "loss.png", title="a run")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="no record with a loss"):
        plot_loss(path, tmp_path / "loss.png")
