"""The bar: for long work only, on a terminal only, right numbers, and nothing left of it afterwards."""

import io
import sys
import threading
import time

import pytest
import torch
from rich.console import Console

from fmegatron import checkpoint
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage import manager as manager_module
from fmegatron.checkpoint.manage import progress, walk
from fmegatron.checkpoint.manage.report import Report, state_bytes
from fmegatron.checkpoint.writing import saving
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import cut_tree, run

LAYOUTS = {"w": Layout((64, 1024), torch.float32, Mesh())}
STATE = {"w": torch.ones(64, 1024)}
BYTES = 64 * 1024 * 4


def shown(work, total=1000, so_far=lambda: 500, wait_s=1.0, **options):
    """What a terminal gets while `work` runs."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with progress.progress(
        "saving step 7", total, so_far, console=console, **{"active": True, "after_s": 0.0, **options}
    ):
        work(screen)
    return screen.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def until(text):
    """Work that lasts until the bar shows `text`."""

    def work(screen):
        end = time.monotonic() + 600
        while text not in screen.getvalue():
            assert time.monotonic() < end, screen.getvalue()[-300:]
            time.sleep(0.01)

    return work


def test_a_bar_with_numbers():
    count = iter(range(0, 900, 2))
    text = shown(until("bytes/s"), total=900, so_far=lambda: next(count))
    assert "saving step 7" in text and "/900 bytes" in text
    assert text.endswith("\x1b[2K") and "\x1b[?25h" in text  # its line is cleared, the cursor is back


def test_more_than_expected_is_all_of_it():
    """Files hold padding, too."""
    assert "1.0/1.0 kB" in shown(until("1.0/1.0 kB"), so_far=lambda: 5000)


def test_an_unknown_amount_pulses():
    text = shown(until("?"), so_far=lambda: None)
    assert "saving step 7" in text and "500" not in text


def test_short_work_shows_nothing():
    assert shown(lambda screen: time.sleep(0.05), after_s=30.0) == ""
    assert progress.AFTER_S == 2.0


def test_no_terminal_no_bar(monkeypatch):
    """Nothing is asked, no thread is started; unless one asks for it."""
    threads = threading.active_count()
    for active in (None, False):
        text = shown(lambda screen: time.sleep(0.02), active=active, so_far=pytest.fail)
        assert text == "" and threading.active_count() == threads
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert "0.5/1.0 kB" in shown(until("0.5/1.0 kB"), active=None)


def test_the_block_keeps_its_errors():
    with pytest.raises(RuntimeError, match="disk full"):
        shown(lambda screen: (_ for _ in ()).throw(RuntimeError("disk full")))


def test_what_a_save_has_written(tmp_path, monkeypatch):
    """Counted from outside, with all ranks' files, of what has a draft and nothing else."""
    seen, real = [], saving.write_part
    mesh = Mesh(fsdp=2)
    layouts = {"w": Layout((64, 1024), torch.float32, mesh, ("fsdp",))}
    parts = cut_tree(STATE, layouts)
    so_far = open_store(tmp_path / "a").bytes_begun
    assert so_far() == 0

    def watched(storage, plans, tensors, rank, **options):
        part = real(storage, plans, tensors, rank, **options)
        seen.append(so_far())
        return part

    monkeypatch.setattr(saving, "write_part", watched)
    run(2, lambda world: checkpoint.save(tmp_path / "a", parts[world.rank], layouts, world))
    assert BYTES / 2 <= min(seen) <= max(seen) and max(seen) >= BYTES
    assert so_far() == 0  # nothing is under way


def test_what_a_restore_has_read(tmp_path):
    checkpoint.save(tmp_path / "a", STATE, LAYOUTS)
    so_far = progress.read_from_now()
    assert so_far() < BYTES / 2
    checkpoint.restore(tmp_path / "a", LAYOUTS)
    assert BYTES <= so_far() < 4 * BYTES


def test_where_the_system_does_not_count(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *a: (_ for _ in ()).throw(FileNotFoundError()))
    assert progress.read_from_now()() is None


def test_a_manager_shows_one_bar_on_rank_0(tmp_path, monkeypatch):
    calls = []

    def noted(what, total, so_far, active=None, **options):
        calls.append((what, total, active))
        return progress.progress(what, total, so_far, False)

    monkeypatch.setattr(manager_module, "progress", noted)
    monkeypatch.setattr(walk, "progress", noted)
    mesh = Mesh(fsdp=2)
    layouts = {"w": Layout((64, 1024), torch.float32, mesh, ("fsdp",))}
    parts = cut_tree(STATE, layouts)

    def of(world):
        return Manager(tmp_path, world=world, show_progress=True)

    run(2, lambda world: of(world).save(7, parts[world.rank], layouts))
    run(2, lambda world: of(world).restore_latest(layouts))
    assert sorted(calls) == sorted(
        [("saving step 7", BYTES, True), ("saving step 7", BYTES, False)]
        + [("restoring step 7", BYTES // 2, True), ("restoring step 7", BYTES // 2, False)]
    )


def test_a_report_is_a_record():
    report = Report("save", 3, "a", 3_000_000_000, 1.5, 0.25)
    assert report.record() == {
        "save_seconds": 1.5, "save_stall_seconds": 0.25, "save_gb": 3.0, "save_gb_per_s": 2.0
    }  # fmt: skip
    begun = Report("save", 3, "a", 3_000_000_000, 0.25, 0.25, durable=False)
    assert "save_gb_per_s" not in begun.record()  # nothing has reached the disk
    assert state_bytes({"a": LAYOUTS["w"], "b": Layout((3,), torch.bool, Mesh(dp=4))}) == BYTES + 3
