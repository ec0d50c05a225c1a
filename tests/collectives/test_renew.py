"""New communicators in the same processes: whatever the ranks were in when they were woken, all come to the meeting."""

import json
import threading
import time
import warnings

import pytest

from fmegatron.collectives.process_group import last_references


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_woken_at_any_time_all_meet_again(python, seed):
    """A send of gloo's event loop that failed woke nobody: of 60 meetings some had a rank that never came."""
    for out, _ in python.two_ranks("tests.collectives.renewing", 60, seed):
        longest = json.loads(out.splitlines()[-1])
        assert longest["wake"] < 5 and longest["renew"] < 15, longest


def test_a_thread_of_a_group_that_does_not_end_is_left_behind():
    """The last reference goes in a thread of its own, so that whoever leaves is not held back; and it says so."""

    class Group:
        def __init__(self, ends):
            self.ends = ends

        def __del__(self):
            self.ends.wait(20)

    ends, began = threading.Event(), time.monotonic()
    group = Group(ends)
    with pytest.warns(RuntimeWarning, match="left behind"), last_references([group], 0.2):
        del group
    assert time.monotonic() - began < 5
    ends.set()
    group = Group(ends)
    with warnings.catch_warnings(), last_references([group], 5.0):
        warnings.simplefilter("error")
        del group
