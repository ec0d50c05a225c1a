"""How much does data cost? Batches against Megatron's dataset, opening a huge corpus, read-ahead, prepare.

    make bench-data
    python experiments/benchmarks/data.py [--rounds=9] [--quick]

Processor seconds of one process, which are wall seconds on an idle core, both sides alternating. Peers are processes of
their own (peers/data.py, `make bench-peers-env`): megatron-core's GPTDataset with torch's DataLoader, grain, torchdata;
those that cannot be started are left out and named. Without megatron-core its line has a rewrite of its dataset (three
index arrays, samples joined from documents, torch's default collate, masks and positions cached), and says so. The huge
corpus is sparse: 10^9 documents of 1,000 tokens, of whose files those entries exist that opening looks at. JSON lines
on stdout, a table on stderr.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers.process import Peer, started

from fmegatron import data
from fmegatron.data.indexed import HEADER, checked_places
from fmegatron.data.prepare import prepare
from fmegatron.data.reader import ahead
from fmegatron.testing.measure import report

S, B = 2048, 8
WHERE = f"1 process, 1 thread, processor time, {platform.machine()}, torch {torch.__version__}"


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[float]:
    """second / first of each round, in processor seconds, after a round that warms up; the order alternates."""
    ratios = []
    for i in range(rounds + 1):
        taken = {work: work() for work in ((first, second) if i % 2 else (second, first))}
        ratios.append(taken[second] / taken[first])
    return ratios[1:]


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """The work as a function that returns its processor seconds in this process."""

    def seconds() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return seconds


class GPTDataset(torch.utils.data.Dataset):
    """Samples as Megatron's GPTDataset makes them, from document index, sample index and shuffle index."""

    def __init__(self, tokens: data.IndexedTokens, seq_len: int, seed: int):
        self.ids, self.starts, self.S = np.asarray(tokens.ids), tokens.document_starts(), seq_len
        random = np.random.RandomState(seed)
        self.documents = np.arange(tokens.documents, dtype=np.int32)
        random.shuffle(self.documents)
        ends = np.cumsum(np.diff(self.starts)[self.documents])
        total = (int(ends[-1]) - 1) // seq_len
        at = np.arange(total + 1) * seq_len
        place = np.searchsorted(ends, at, side="right")
        self.samples = np.stack([place, at - np.concatenate([[0], ends])[place]], 1)
        self.shuffle = np.arange(total, dtype=np.uint32)
        random.shuffle(self.shuffle)
        self.mask, self.positions = torch.ones(seq_len), torch.arange(seq_len)

    def __len__(self):
        return len(self.shuffle)

    def __getitem__(self, index):
        (first, offset), (last, end) = (self.samples[self.shuffle[index] + i] for i in range(2))
        parts = []
        for place in range(first, last + 1):
            document = self.documents[place]
            start, stop = self.starts[document], self.starts[document + 1]
            a = start + offset if place == first else start
            b = start + end + 1 if place == last else stop
            parts.append(self.ids[a:b])
        text = torch.from_numpy(np.array(np.concatenate(parts), dtype=np.int64))
        tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        mask = self.mask.clone()
        mask[labels == -1] = 0.0
        tokens[tokens == -1] = 0
        labels[labels == -1] = 0
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": self.positions}


def corpus(path: Path, count: int) -> data.IndexedTokens:
    """A corpus of about so many tokens in documents of 1 to 2,000."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 2000, count // 1000)
    ids = random.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16)
    return data.write_indexed(path, np.split(ids, np.cumsum(lengths)[:-1]), np.uint16)


def bench_batches(folder: Path, rounds: int, quick: bool) -> list[Peer]:
    """Batches.at against the peers and its floor; Megatron's order against Megatron, with the same samples."""
    steps = 50 if quick else 200
    tokens = corpus(folder / "corpus", 4_000_000 if quick else 40_000_000)
    windows, same = (data.Batches(tokens, B, S, 1, order=order) for order in ("own", data.Megatron(keep=False)))

    def reading(batches: data.Batches) -> Callable[[int], float]:
        def work(begin):
            for n in range(begin, begin + steps):
                batches.at(n)

        return lambda begin: timed(lambda: work(begin))()

    def going_on(read: Callable[[int], float], endless: bool = False) -> Callable[[], float]:
        """Other steps each round; of what has one epoch, those again."""
        last = int(windows.steps_per_epoch) - steps
        begins = itertools.count(0, steps) if endless else itertools.cycle(range(0, last, steps))
        return lambda: read(next(begins))

    peers = started("data.py", ("megatron", "grain", "torchdata"), folder / "corpus", B, S, 1, folder)
    sides = {peer.name: lambda begin, peer=peer: peer.ask(f"batches {begin} {steps}") for peer in peers}
    against = {"grain": "grain.MapDataset, read by number", "torchdata": "torchdata's StatefulDataLoader"}
    if "megatron" in sides:
        against["megatron"] = "megatron-core's GPTDataset + DataLoader"
        for n in (0, 7):
            assert peers[0].ask(f"labels {n}") == zlib.crc32(same.at(n)["labels"].numpy()), "other samples"
    else:
        against["megatron"] = "numpy rewrite of Megatron's GPTDataset + DataLoader"
        sides["megatron"] = rewritten(tokens, same, steps)
    at, bars = f"{B} x {S} uint16, {WHERE}", {"megatron": ">= 10", "grain": ">= 2.5", "torchdata": ">= 1.8"}
    for name, side in sides.items():
        ratios = paired(going_on(reading(windows), endless=True), going_on(side), rounds)
        report(f"batches_vs_{name}", ratios, unit="times as fast", against=against[name], bar=bars[name], where=at)
    ratios = paired(going_on(reading(same)), going_on(sides["megatron"]), rounds)
    report("batches_in_megatrons_order", ratios, unit="times as fast", against=against["megatron"], where=at)

    ids, (tokens_BS, labels_BS) = np.zeros((B, S + 1), np.uint16), np.empty((2, B, S), np.int64)

    def converted():
        for _ in range(steps):
            tokens_BS[:], labels_BS[:] = ids[:, :-1], ids[:, 1:]

    ratios = paired(timed(converted), going_on(reading(windows), endless=True), rounds)
    report("batches_over_floor", ratios, unit="ratio", where=at,
           against="the same ids, which lie in the cache, converted into two arrays that are there")  # fmt: skip
    return peers


def rewritten(tokens: data.IndexedTokens, same: data.Batches, steps: int) -> Callable[[int], float]:
    """Processor seconds of so many steps of the rewrite, which has the samples of `same`."""
    dataset = GPTDataset(tokens, S, 1)
    for n in (0, 7):
        batch = torch.utils.data.default_collate([dataset[n * B + i] for i in range(B)])
        assert torch.equal(batch["labels"], same.at(n)["labels"]), "the rewrite and Megatron's order differ"

    def work(begin: int) -> None:
        sampler = [list(range(n * B, n * B + B)) for n in range(begin, begin + steps)]
        for _ in torch.utils.data.DataLoader(dataset, batch_sampler=sampler):
            pass

    return lambda begin: timed(lambda: work(begin))()


def bench_order(folder: Path, rounds: int, quick: bool, peers: list[Peer]) -> None:
    """Megatron's order made for many documents against Megatron's index, and mapped when it is there."""
    count = 10**5 if quick else 10**7
    starts = np.arange(count + 1)
    with open(folder / "many.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        file.write(np.full(count, 500, dtype="<i4").tobytes() + (starts[:-1] * 1000).astype("<i8").tobytes())
        file.write(starts.astype("<i8").tobytes())
    with open(folder / "many.bin", "wb") as file:
        file.truncate(count * 1000)
    tokens = data.IndexedTokens(folder / "many")
    where, taken = f"{count:,} documents, 1 epoch, {WHERE}", []
    work = timed(lambda: data.Batches(tokens, 8, 2048, 1, order=data.Megatron()))

    def made() -> float:
        for stored in folder.glob("many.*.order"):
            stored.unlink()
        taken.append(work())
        return taken[-1]

    for peer in peers:
        if peer.name == "megatron":
            ratios = paired(made, lambda: peer.ask(f"order {folder / 'many'}"), min(rounds, 5))  # noqa: B023
            report("megatron_order_vs_its_own", ratios, unit="times as fast", where=where, bar=">= 1.0",
                   against="megatron-core's GPTDataset, C++, index stored")  # fmt: skip
    made()
    report("megatron_order_made", taken, unit="s", where=where)
    report("megatron_order_mapped", [work()], unit="s", where=where)


def bench_open(folder: Path, rounds: int) -> None:
    """Opening and the first batch of 10^9 documents, 10^12 tokens."""
    N, length = 10**9, 1000
    with open(folder / "huge.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, N, N + 1))
        for a, b in [(0, 1), *checked_places(N), (N - 1, N)]:
            file.seek(HEADER + 4 * a)
            file.write(np.full(b - a, length, dtype="<i4").tobytes())
            file.seek(HEADER + 4 * N + 8 * a)
            file.write((np.arange(a, b) * 2 * length).astype("<i8").tobytes())
        for a, b in [(0, 1), *checked_places(N + 1), (N, N + 1)]:
            file.seek(HEADER + 12 * N + 8 * a)
            file.write(np.arange(a, b).astype("<i8").tobytes())
    with open(folder / "huge.bin", "wb") as file:
        file.truncate(N * length * 2)
    taken, memory = [], []
    for i in range(rounds):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        batch = data.Batches(data.IndexedTokens(folder / "huge"), 8, 2048, seed=i).at(0)
        taken.append(time.process_time() - start)
        memory.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
        assert batch["tokens"].shape == (8, 2048)
    where = f"1e9 documents, 1e12 tokens, sparse, {WHERE}"
    report("open_and_first_batch", taken, unit="s", bar="<= 0.1", where=where)
    report("open_and_first_batch_memory", [max(memory)], unit="MiB", bar="<= 16", where=where)


def bench_ahead(folder: Path, rounds: int) -> None:
    """What a step of 20 ms waits for a batch that takes 5 ms: the mean over 50 steps."""
    batches = data.Batches(data.IndexedTokens(folder / "corpus"), 8, 2048, 1)

    @data.source
    def slow(n: int):
        time.sleep(0.005)  # a disk
        return batches.at(n)

    shares = {"plain": [], "ahead": []}
    for _ in range(rounds):
        with ahead(slow) as reader:
            reader(0)
            for name, batch_at in (("plain", slow.at), ("ahead", reader)):
                waited = 0.0
                for n in range(1, 51):
                    time.sleep(0.02)
                    start = time.perf_counter()
                    batch_at(n)
                    waited += time.perf_counter() - start
                shares[name].append(waited / (50 * 0.02))
    where = f"steps of 20 ms (sleep), batches of 5 ms, wall time, {platform.machine()}"
    report("read_ahead_lost", shares["ahead"], unit="share of the step", against="nothing lost", bar="<= 0.01",
           where=where, note=f"without: {np.median(shares['plain']):.2f}")  # fmt: skip


def bench_prepare(folder: Path, rounds: int, quick: bool) -> None:
    """prepare in one process against a plain loop with the same tokenizer that writes a .bin."""
    text = Path("data/tinyshakespeare.txt").read_text()
    tokenizer = data.CharTokenizer.from_text(text)
    tokenizer.save(folder / "tokenizer.json")
    pieces = [text[a : a + 2000] for a in range(0, len(text), 2000)]
    with open(folder / "in.jsonl", "w") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces * (1 if quick else 5))

    def plain():
        ids = []
        with open(folder / "in.jsonl") as lines:
            for line in lines:
                ids.append(tokenizer.encode(json.loads(line)["text"]).astype(np.uint16))
        with open(folder / "plain.bin", "wb") as file:
            np.concatenate(ids).tofile(file)
            os.fsync(file.fileno())

    def ours():
        prepare([folder / "in.jsonl"], folder / "prepared", str(folder / "tokenizer.json"))

    ratios = paired(timed(ours), timed(plain), rounds)
    report("prepare_vs_plain_loop", ratios, unit="times the tokens per second", bar=">= 1.0",
           against="json.loads, encode, tofile in one process", where=f"characters, {WHERE}")  # fmt: skip
    assert (folder / "plain.bin").read_bytes() == (folder / "prepared.bin").read_bytes()


def main() -> None:
    """Print the lines."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = flags.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(Path(__file__).parents[2]):
        folder = Path(name)
        bench_open(folder, rounds)  # first: its memory is seen while this process is small
        peers = bench_batches(folder, rounds, options.quick)
        bench_order(folder, rounds, options.quick, peers)
        for peer in peers:
            peer.end()
        bench_ahead(folder, rounds)
        bench_prepare(folder, rounds, options.quick)


if __name__ == "__main__":
    sys.exit(main())
