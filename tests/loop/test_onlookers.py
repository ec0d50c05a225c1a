"""What watches a run never ends it: loggers, log files, the terminal, a profiler; the first failure is a warning."""

import asyncio
import builtins
import errno
import io
import math
import os
import sys
import warnings

import pytest
import torch

from fmegatron import tree
from fmegatron.data import source
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Log, Loggers, Options, Policies, Run, Save, json_lines, read_metrics
from fmegatron.loop.events import Events, read_events
from fmegatron.loop.loggers import Table
from fmegatron.loop.onlookers import Onlooker
from fmegatron.loop.until import Until

SPECS = {"w": tree.ArraySpec(Layout((4,), torch.float64, Mesh()), 1.0)}
BATCHES = source(lambda position: torch.full((4,), float(position), dtype=torch.float64))


def halve(state, batch):
    return {"w": (state["w"] + batch) / 2}, {"loss": ((state["w"] - batch) ** 2).sum()}


def updates(folder, steps=6, loggers=(), **options):
    """(updates that the run has made, the words of its warnings)."""
    options = {"log": Log(every=1), "save": Save(every=100)} | options
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = Run(folder, halve, SPECS, options=Options(**options), policies=Policies(loggers=loggers))
        made = sum(1 for _ in run(BATCHES, steps=steps))
    return made, [str(one.message) for one in seen]


class Tracker:
    """A logger whose server does not answer in one of its calls."""

    def __init__(self, *fails):
        self.fails, self.written = fails, []

    def _call(self, name):
        if name in self.fails:
            raise ConnectionError(f"no answer to {name}")

    def resume(self, step):
        self._call("resume")

    def write(self, step, values):
        self._call("write" if step != 3 else "write once")
        self.written.append(step)

    def close(self):
        self._call("close")


@pytest.mark.parametrize("fails", ["resume", "write once", "close"])
def test_a_logger_that_raises_is_warned_of_once(tmp_path, fails):
    tracker, other = Tracker(fails), Tracker()
    made, words = updates(tmp_path, loggers=(tracker, other))
    assert made == 6 and len(words) == 1 and f"the logger Tracker: ConnectionError: no answer to {fails}" in words[0]
    assert [step for step in range(1, 7) if step not in tracker.written] == [3] * (fails == "write once")
    assert set(other.written) == set(range(1, 7)) and len(read_metrics(tmp_path / "metrics.jsonl")) == 7


class Unspeakable(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), Unspeakable()], ids=repr)
def test_whatever_a_logger_raises(tmp_path, error):
    """A service that calls sys.exit, a task that was cancelled, an error without a text."""
    tracker = Tracker()

    def write(step, values):
        values.clear()  # they are its own
        raise error

    tracker.write = write
    made, words = updates(tmp_path, loggers=(tracker,))
    assert made == 6 and f"the logger Tracker: {type(error).__name__}" in words[0] and "7 of 9 calls" in words[1]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stream", ["none", "closed"])
def test_a_process_without_a_console(tmp_path, monkeypatch, stream):
    closed = io.StringIO()
    closed.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if stream == "none" else closed)
    run = Run(tmp_path, halve, SPECS, options=Options(log=Log(every=1), save=Save(every=2)))

    def nowhere(*given, **named):
        raise ValueError("I/O operation on closed file.")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", nowhere)
        assert sum(1 for _ in run(BATCHES, steps=4)) == 4
        other = Run(tmp_path, halve, SPECS, options=Options(log=Log(every=2), save=Save(every=2)))
        assert sum(1 for _ in other(BATCHES, steps=6)) == 2


def test_a_table_of_numbers_that_are_none(capsys):
    Table().write(1, {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 12345.0})
    assert capsys.readouterr().out.split()[-4:] == ["inf", "-inf", "nan", "12,345"]


def test_failures_are_counted(tmp_path):
    made, words = updates(tmp_path, loggers=[Tracker("write", "write once")])
    assert made == 6 and len(words) == 2 and "the logger Tracker: 7 of 9 calls failed" in words[1]


def test_what_computes_is_no_onlooker(tmp_path):
    def broken(state):
        raise ZeroDivisionError("the evaluation")

    with pytest.raises(ZeroDivisionError):
        list(Run(tmp_path, halve, SPECS, evaluate=broken, options=Options(log=Log(eval_every=2)))(BATCHES, steps=4))
    onlooker = Onlooker("one that is interrupted")
    with pytest.raises(KeyboardInterrupt):
        onlooker(_interrupt)


def _interrupt():
    raise KeyboardInterrupt


HUGE = f'{{"step": {10**400}}}'  # no float is as large


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "\udcff\0", "[]", '{"step": "4"}', "[" * 100_000, HUGE])
def test_a_torn_line_in_the_middle_costs_that_line(tmp_path, torn):
    updates(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_bytes("".join([*lines[:2], f"{torn}\n", *lines[3:]]).encode(errors="surrogateescape"))
    made, words = updates(tmp_path, steps=8)
    assert made == 3 and len(words) == 1 and "metrics.jsonl:3: got no record" in words[0]
    losses = [record["step"] for record in read_metrics(path) if "loss" in record]
    assert losses == [1, 2, 4, 5, 6, 7, 8] and path.read_text().startswith("".join(lines[:2]))  # kept to the byte


class FullDisk:
    """In the place of os.write: after some bytes a part of a line is written, then nothing, until there is room."""

    def __init__(self, monkeypatch, room):
        self.room, self.write = room, os.write
        monkeypatch.setattr(json_lines.os, "write", self)

    def __call__(self, file, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.write(file, data[: self.room])
        self.room -= written
        return written


def test_no_room_for_a_log_line(tmp_path, monkeypatch):
    disk = FullDisk(monkeypatch, 1000)
    tracker = Tracker()
    tracker.write = lambda step, values: setattr(disk, "room", 10**6 if step == 12 else disk.room)
    made, words = updates(tmp_path, steps=16, loggers=[tracker])
    assert made == 16 and any("JsonLines of" in text and "No space left" in text for text in words)
    assert any("JsonLines of" in text and "calls failed" in text for text in words)
    with pytest.warns(RuntimeWarning, match="got no record"):
        steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert 1 in steps and steps[-5:] == [13, 14, 15, 16, 16] and 11 not in steps


def test_no_room_for_an_event(tmp_path, monkeypatch):
    disk, path = FullDisk(monkeypatch, 150), tmp_path / "events.jsonl"
    with (
        pytest.warns(RuntimeWarning, match="events.jsonl: OSError.*No space left"),
        pytest.warns(RuntimeWarning, match="3 of 8 calls failed"),
        Events(path) as events,
    ):
        for step in range(1, 6):
            events("saved", step)
        disk.room = 10**6
        events("saved", 6)
    assert [event["step"] for event in read_events(path)] == [1, 2, 6, 6]


def test_a_terminal_that_is_gone(tmp_path, monkeypatch):
    def gone(*values, **how):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(builtins, "print", gone)
    made, words = updates(tmp_path)
    assert made == 6 and len(words) >= 1 and len(read_metrics(tmp_path / "metrics.jsonl")) == 7


def test_files_for_people_that_cannot_be_written(tmp_path):
    for name in ("config.json", "events.jsonl", "starts.json", "metrics.jsonl", "profiles"):
        (tmp_path / name).mkdir() if name != "profiles" else (tmp_path / name).touch()
    until = Until(file=str(tmp_path / ("x" * 300)))  # a question that the file system does not answer
    made, words = updates(tmp_path, log=Log(every=1, profile="trace:steps=2-3"), until=until)
    assert made == 6
    for words_of in ("what a run shows", "events in", "the logger JsonLines", "window of a profiler"):
        assert any(words_of in text for text in words), (words_of, words)


def test_loggers_by_hand_hold_to_the_same(tmp_path):
    tracker = Tracker("write once", "close")
    counted = pytest.warns(RuntimeWarning, match="2 of 6 calls failed")
    with counted, pytest.warns(RuntimeWarning, match="no answer to write once"), Loggers(tracker) as log:
        for step in range(1, 5):
            log(step, {"loss": 1.0})
    assert tracker.written == [1, 2, 4]
