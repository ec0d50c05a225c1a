"""Several ranks in one process: threads that meet at a barrier; small sizes, so that small arrays have many chunks."""

import contextlib
import itertools
import queue
import threading
from unittest import mock

import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.files import format, parse
from fmegatron.checkpoint.reading import fetch
from fmegatron.checkpoint.writing import plan
from fmegatron.tree.structure import flatten, unflatten


class FakeWorld:
    """One rank of `run`; has what `checkpoint` needs of a World. `exchanged`: bytes that it received from others."""

    device = torch.device("cpu")

    def __init__(self, rank, size, barrier, board, mail):
        self.rank, self.size, self._barrier, self._board, self._mail = rank, size, barrier, board, mail
        self.exchanged = 0

    def _show(self, value, look):
        """Put a value on the board, wait for all, look at the board, wait until all have looked."""
        self._board[self.rank] = value
        self._barrier.wait(120)
        try:
            return look(list(self._board))
        finally:
            self._barrier.wait(120)

    def agree(self, error, what):
        errors = self._show(error, list)
        first = next((r for r, e in enumerate(errors) if e is not None), None)
        if first is not None:
            raise RuntimeError(f"{what} failed on rank {first} of {self.size}: {errors[first]}")

    def broadcast_text(self, text, source=0):
        return self._show(text, lambda board: board[source])

    def gather_rows(self, row):
        return self._show(row, torch.stack)

    def minimum(self, row):
        return self._show(row, lambda board: torch.stack(board).amin(0))

    def exchange(self, sends, receives):
        """Only the ranks that are named meet, as in a World; what was sent is on its way and may be changed."""
        for peer, x in sends:
            self._mail[self.rank, peer].put(x.view(-1).view(torch.uint8).clone())
        for peer, x in receives:
            x.view(-1).view(torch.uint8).copy_(self._mail[peer, self.rank].get(timeout=600))
            self.exchanged += x.nbytes * (peer != self.rank)


def run(size, function):
    """[function(world) on every rank]; a raised error stands in the place of its rank's result."""
    results, barrier, board = [None] * size, threading.Barrier(size), [None] * size
    mail = {pair: queue.SimpleQueue() for pair in itertools.product(range(size), repeat=2)}

    def rank_main(rank):
        try:
            results[rank] = function(FakeWorld(rank, size, barrier, board, mail))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def cut(x, layout):
    """The local tensor of every rank, bit by bit."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[x.element_size()]
    parts = [torch.empty(layout.local_shape(rank), dtype=x.dtype) for rank in range(layout.mesh.size)]
    for rank, part in enumerate(parts):
        for box in layout.boxes(rank):
            box.view(part.view(width)).copy_(x.view(width)[box.slices])
    return parts


def cut_tree(state, layouts):
    """The local trees of all ranks."""
    _, leaves, spec = flatten(layouts)
    parts = [cut(x, layout) for x, layout in zip(tree.leaves(state), leaves, strict=True)]
    return [unflatten(spec, [part[rank] for part in parts]) for rank in range(leaves[0].mesh.size)]


def save_all(path, state, layouts, **options):
    """Save a tree of global arrays from all ranks of the layouts' mesh; returns what each rank got."""
    local = cut_tree(state, layouts)
    return run(len(local), lambda world: checkpoint.save(path, local[world.rank], layouts, world, **options))


def assert_same_bits(got, wanted, note=""):
    """Trees of tensors are equal bit for bit, dtypes and shapes included."""
    for path, a, b in zip(tree.paths(wanted), tree.leaves(got), tree.leaves(wanted), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (path, a.dtype, a.shape, b.dtype, b.shape, note)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (path, note)


@contextlib.contextmanager
def small_sizes(chunk=128, band=32, file=512):
    """Sizes in bytes instead of MiB: nothing but 0-d leaves is packed, chunks, bands and files are tiny."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (plan, "SMALL_BYTES", 1),
            (plan, "MOST_SMALL", 0),
            (plan, "_FINEST_BYTES", 8),
            (plan, "_SENSIBLE_BYTES", 4),
            (plan, "CHUNK_BYTES", chunk),
            (plan, "_LEAST_BYTES", file),
            (format, "BAND_BYTES", band),
            (parse, "BAND_BYTES", band),
            (fetch, "BAND_BYTES", band),
            (fetch, "_JOB_BYTES", 2 * band),
            (fetch, "_SPAN_BYTES", 2 * band),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
