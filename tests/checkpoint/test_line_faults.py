"""What is newer than the step that a run goes on from, and cannot be seen, or is no complete step: said, never lost."""

import os

import pytest

from fmegatron.checkpoint import Manager
from tests.checkpoint.fake_world import assert_same_bits
from tests.checkpoint.test_line import filled
from tests.checkpoint.test_manager import ONE, state


@pytest.mark.parametrize("temporary", [False, True])
def test_a_save_past_a_step_that_cannot_be_seen_says_how_to_give_it_up(tmp_path, monkeypatch, temporary):
    manager = filled(tmp_path, 1, 2)
    manager.save(3, state(3), ONE, temporary=temporary)
    hidden, real = manager.path(3, temporary), os.stat
    this = real(hidden).st_ino

    def refuse(path, *args, **kwargs):
        if path == f"{hidden}/COMPLETE" and os.path.lexists(hidden) and os.lstat(hidden).st_ino == this:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    with Manager(tmp_path, keep=1) as manager:
        assert_same_bits(manager.restore(2, ONE)[0], state(2))
        call = "delete(3, temporary=True)" if temporary else "delete(3)"
        with pytest.raises(RuntimeError) as got:
            manager.save(3, state(33), ONE)
        assert f"or give it up: Manager.{call}: '{hidden}" in str(got.value)
        manager.delete(3, temporary)
        manager.save(3, state(33), ONE)
        assert manager.steps() == [3]
    assert_same_bits(manager.restore(3, ONE)[0], state(33))
