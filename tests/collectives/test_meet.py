"""The ranks of one attempt find each other in a store that is full of what attempts before them have left."""

import threading
import time

import pytest
import torch.distributed as dist

from fmegatron.collectives.meet import meet


def together(store, ranks, size, use="test", timeout_s=600, first=0.0, given_up=lambda: False):
    """{rank: what `meet` returned or raised} of threads that stand for ranks; rank 0 comes `first` seconds late."""
    found = {}

    def come(rank):
        if rank == 0:
            time.sleep(first)
        try:
            found[rank] = meet(store, rank, size, use, timeout_s, given_up)
        except TimeoutError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def word(stores):
    """What rank 0 wrote, as all others read it."""
    stores[0].set("address", "here")
    return {rank: store.get("address") for rank, store in stores.items()}


@pytest.mark.long
@pytest.mark.parametrize("first", [0.0, 0.05])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_attempt_has_a_part_of_its_own(size, first):
    """Also after an attempt in which only some ranks came, and left their questions."""
    store = dist.HashStore()
    store.set("address", "of a dead process")
    for attempt in range(3):
        found = together(store, range(size), size, first=first)
        assert not any(part.check(["address"]) for part in found.values()), attempt
        assert word(found) == dict.fromkeys(range(size), b"here")
        assert store.get("address") == b"of a dead process"
        absent = together(store, range(1, size), size, timeout_s=0.2)
        assert all(isinstance(part, TimeoutError) for part in absent.values())
        if size > 2:  # rank 0 answers the questions of dead processes, and waits for the living
            assert isinstance(together(store, [0, 1], size, timeout_s=0.2)[0], TimeoutError)


def test_uses_do_not_see_each_other():
    store = dist.HashStore()
    a, b = (together(store, range(2), 2, use) for use in ("a", "b"))
    assert word(a) == {0: b"here", 1: b"here"} and not b[0].check(["address"])


def test_who_did_not_come_is_named():
    found = together(dist.HashStore(), [0, 2], 4, timeout_s=1.0)
    assert str(found[0]) == "no word from rank 1, 3 of 4 within 1 s; were they started?"
    assert "rank 0 did not answer" in str(together(dist.HashStore(), [1], 2, timeout_s=0.1)[1])


def test_a_meeting_can_be_left():
    assert together(dist.HashStore(), [1], 2, given_up=lambda: True) == {1: None}
    assert together(dist.HashStore(), [0], 2, given_up=lambda: True) == {0: None}
