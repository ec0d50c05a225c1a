"""Ctrl-C anywhere in an asynchronous save: what the ranks have agreed upon is done on all, and no report is lost.

And in what holds a directory or a step: a note that is left in a process that lives on would hold it for ever.
"""

import os
import signal
import threading
import time
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.collectives import World
from fmegatron.collectives.interrupt import held_interrupt
from fmegatron.layout import Layout, Mesh

LAYOUTS = {"w": Layout((64, 48), torch.float32, Mesh())}


def state(value):
    return {"w": torch.full((64, 48), float(value))}


def press():
    os.kill(os.getpid(), signal.SIGINT)


class Pressed(World):
    """A world in which Ctrl-C comes when the ranks have just agreed by the method `at`, once `armed`."""

    def __init__(self, at, armed=False):
        super().__init__(Mesh(), 0, torch.device("cpu"))
        self.at, self.armed = at, armed

    def _done(self, method, result=None):
        if self.armed and method == self.at:
            self.armed = False
            press()
        return result

    def agree(self, error, what):
        self._done("agree", super().agree(error, what))

    def broadcast_text(self, text, source=0):
        return self._done("broadcast_text", super().broadcast_text(text, source))

    def minimum(self, row):
        return self._done("minimum", super().minimum(row))


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


def listen_until(saver, done):
    """The writer says so, and no rank has heard of it yet."""
    end = time.monotonic() + 600
    while not done() and time.monotonic() < end:
        saver._flights.listen(0.05)
    assert done()


def test_what_the_ranks_agreed_upon_in_poll_has_ended(tmp_path, saver):
    world = Pressed("minimum")
    handle = checkpoint.save_async(tmp_path / "a", state(1), LAYOUTS, world, saver=saver)
    listen_until(saver, lambda: handle.committed)
    world.armed = True
    with pytest.raises(KeyboardInterrupt):
        handle.poll()
    assert handle.state == "durable" and saver.pending == ()  # as on the other ranks
    assert handle.poll()


def test_a_save_that_the_ranks_give_up_is_given_up(tmp_path, saver):
    world = Pressed("agree")
    handle = checkpoint.save_async(tmp_path / "a", state(1), LAYOUTS, world, saver=saver)
    world.armed = True
    with pytest.raises(KeyboardInterrupt):
        handle.abandon()
    assert handle.state == "abandoned" and saver.pending == ()


def test_a_save_that_all_ranks_have_begun_is_pending_and_fails(tmp_path, saver):
    with pytest.raises(KeyboardInterrupt):
        saver.save(tmp_path / "a", state(1), LAYOUTS, Pressed("broadcast_text", True))
    assert len(saver.pending) == 1  # as on the other ranks
    with pytest.raises(RuntimeError, match="KeyboardInterrupt while it was staged"):
        saver.poll()
    assert saver.pending == () and os.listdir(tmp_path) == []


def test_a_save_that_is_not_begun_leaves_nothing(tmp_path, saver):
    with pytest.raises(KeyboardInterrupt):
        saver.save(tmp_path / "a", state(1), LAYOUTS, Pressed("agree", True))
    assert saver.pending == () and os.listdir(tmp_path) == []
    saver.save(tmp_path / "a", state(2), LAYOUTS).result()


@pytest.mark.long
@pytest.mark.parametrize("call", ["listen", "poll"])
def test_no_report_of_the_writer_is_lost(tmp_path, saver, monkeypatch, call):
    """A "committed" that is taken from the socket and forgotten would be waited for until the job is killed."""
    handle = saver.save(tmp_path / "a", state(1), LAYOUTS)
    reports, seen = saver._flights.process.reports, []

    def pressing(timeout_s=0.0):
        found = reports(timeout_s)
        if found and not seen:
            seen.append(found)
            press()
        return found

    monkeypatch.setattr(saver._flights.process, "reports", pressing)
    with pytest.raises(KeyboardInterrupt):
        while not seen:
            getattr(saver._flights, call)()
    handle.result(timeout_s=600)
    assert seen and handle.state == "durable"


@pytest.mark.long
def test_waiting_for_room_can_be_interrupted(tmp_path):
    """Saves are pending up to a bound; the next one waits, and Ctrl-C ends the waiting and not the pending save."""
    with checkpoint.AsyncSaver(in_flight=1) as saver:
        saver.reserve(LAYOUTS)
        os.kill(saver.writer_pid, signal.SIGSTOP)
        first = saver.save(tmp_path / "a", state(1), LAYOUTS)
        with pytest.raises(KeyboardInterrupt):
            saver.save(tmp_path / "b", state(2), LAYOUTS, Pressed("minimum", True))
        os.kill(saver.writer_pid, signal.SIGCONT)
        assert saver.pending == (first,)
        first.result()
    assert os.listdir(tmp_path) == ["a"]


def test_a_manager_knows_of_the_save(tmp_path, saver):
    """Its saver has the save pending, so its `poll` must not think that nothing is: the other ranks poll."""
    world = Pressed("broadcast_text")
    with checkpoint.Manager(tmp_path, saver=saver, world=world) as manager:
        with pytest.raises(KeyboardInterrupt):
            world.armed = True
            manager.save(1, state(1), LAYOUTS, wait=False)
        with pytest.warns(RuntimeWarning, match="KeyboardInterrupt while it was staged"):
            (report,) = manager.poll()
        assert "KeyboardInterrupt" in report.error and saver.pending == ()
        manager.save(2, state(2), LAYOUTS, wait=False)
    assert manager.steps() == [2]


@pytest.mark.parametrize("method", ["write", "remove"])
@pytest.mark.parametrize("kind", ["reading", "leaving", "claim"])
def test_no_note_outlives_the_call_that_was_interrupted(tmp_path, monkeypatch, kind, method):
    """In a notebook the process lives on: its notes would keep every step that it has read, and refuse its claims."""
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, state(1), LAYOUTS)
        manager.save(2, state(2), LAYOUTS)
    work, pressed = getattr(Notes, method), []

    def interrupted(self, name, *args, **options):
        done = None if method == "remove" else work(self, name, *args, **options)
        if f".{kind}-" in name:
            pressed.append(name)
            if len(pressed) == 1:
                press()
        return work(self, name) if method == "remove" else done

    monkeypatch.setattr(Notes, method, interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:  # and with it the frames of the call, as a notebook keeps them
        if kind == "reading":
            manager.restore(2, LAYOUTS)
        elif kind == "leaving":
            manager.delete(2)
        else:
            with checkpoint.claim(tmp_path):
                pass
    monkeypatch.undo()
    assert pressed and kept.value
    assert [name for name in os.listdir(tmp_path) if f".{kind}-" in name] == []
    assert [thread.name for thread in threading.enumerate() if "lease" in thread.name] == []
    with checkpoint.claim(tmp_path):
        manager.restore(1, LAYOUTS)
        with warnings.catch_warnings(action="ignore"):
            manager.save(2, state(22), LAYOUTS)
    assert manager.restore_latest(LAYOUTS)[1]["w"][0, 0] == 22


def test_an_interrupt_is_held_until_the_end_of_the_outermost_block():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupt() as outer:
            with held_interrupt() as inner:
                press()
                seen.append("inner")
            assert inner is outer and len(outer) == 1
            seen.append("outer")
        seen.append("never")
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_not_held():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupt():
            press()
            seen.append("first")
            press()
            seen.append("never")
    assert seen == ["first"]


def test_an_interrupt_is_not_lost_to_an_error():
    with pytest.raises(KeyboardInterrupt) as caught:
        with held_interrupt():
            press()
            raise RuntimeError("a save failed")
    assert str(caught.value.__cause__) == "a save failed"


def test_a_handler_that_only_notes_is_called_and_nothing_is_held():
    noted, before = [], signal.signal(signal.SIGINT, lambda *_: noted.append(1))
    try:
        with held_interrupt() as pressed:
            press()
        assert noted == [1] and pressed == []
    finally:
        signal.signal(signal.SIGINT, before)
