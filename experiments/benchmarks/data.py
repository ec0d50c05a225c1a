"""How much does data cost? Batches against Megatron's dataset, opening a huge corpus, read-ahead, prepare.

    make bench-data
    python experiments/benchmarks/data.py [--rounds=9] [--quick]

Processor seconds of this process, which are wall seconds on an idle core, both sides alternating. The peer of the first
line is written here in numpy as Megatron's GPTDataset and its DataLoader work (three index arrays, samples joined from
documents, torch's default collate, masks and positions cached), as megatron-core's own needs a compiler and CUDA's
packages: so it is a rewrite, and named so. The huge corpus is sparse: 10^9 documents of 1,000 tokens, of whose files
those entries exist that opening looks at. JSON lines on stdout, a table on stderr.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fmegatron import data
from fmegatron.data.indexed import HEADER, checked_places
from fmegatron.testing import report

WHERE = f"1 process, 1 thread, processor time, {platform.machine()}, torch {torch.__version__}"


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int) -> list[float]:
    """second / first of each round, in processor seconds, after a round that warms up; the order alternates."""
    ratios = []
    for i in range(rounds + 1):
        taken = {}
        for work in (first, second) if i % 2 else (second, first):
            start = time.process_time()
            work()
            taken[work] = time.process_time() - start
        ratios.append(taken[second] / taken[first])
    return ratios[1:]


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


def bench_batches(folder: Path, rounds: int, quick: bool) -> None:
    """Batches.at against the rewrite; Megatron's order against it, with the same samples."""
    S, B, steps = 2048, 8, 50 if quick else 200
    tokens = corpus(folder / "corpus", 4_000_000 if quick else 40_000_000)
    dataset = GPTDataset(tokens, S, 1)
    same = data.Batches(tokens, B, S, 1, order=data.Megatron(keep=False))
    for n in (0, 7):
        peer = torch.utils.data.default_collate([dataset[n * B + i] for i in range(B)])
        assert torch.equal(peer["labels"], same.at(n)["labels"]), "the rewrite and Megatron's order differ"
    windows = data.Batches(tokens, B, S, 1)

    def peers():
        sampler = [list(range(n * B, n * B + B)) for n in range(steps)]
        for _ in torch.utils.data.DataLoader(dataset, batch_sampler=sampler):
            pass

    def ours(batches):
        begins = itertools.count(0, steps)  # other steps each round, so that their order is made anew

        def work():
            begin = next(begins)
            for n in range(begin, begin + steps):
                batches.at(n)

        return work

    against = "numpy rewrite of Megatron's GPTDataset + DataLoader"
    for name, batches, bar in (("batches", windows, ">= 10"), ("batches_in_megatrons_order", same, None)):
        report(f"{name}_vs_gpt_dataset", paired(ours(batches), peers, rounds), unit="times as fast", against=against,
               bar=bar, where=f"{B} x {S} uint16, {WHERE}")  # fmt: skip


def bench_order(folder: Path, quick: bool) -> None:
    """Megatron's order made for many documents, and mapped when it is there."""
    count = 10**5 if quick else 10**7
    starts = np.arange(count + 1)
    with open(folder / "many.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        file.write(np.full(count, 500, dtype="<i4").tobytes() + (starts[:-1] * 1000).astype("<i8").tobytes())
        file.write(starts.astype("<i8").tobytes())
    with open(folder / "many.bin", "wb") as file:
        file.truncate(count * 1000)
    tokens = data.IndexedTokens(folder / "many")
    for name in ("made", "mapped"):
        start = time.process_time()
        data.Batches(tokens, 8, 2048, 1, order=data.Megatron())
        taken = time.process_time() - start
        report(f"megatron_order_{name}", [taken], unit="s", where=f"{count:,} documents, 1 epoch, {WHERE}")


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

    def slow(n: int):
        time.sleep(0.005)  # a disk
        return batches.at(n)

    shares = {"plain": [], "ahead": []}
    for _ in range(rounds):
        with data.ahead(slow) as reader:
            reader(0)
            for name, batch_at in (("plain", slow), ("ahead", reader)):
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
        data.prepare([folder / "in.jsonl"], folder / "prepared", str(folder / "tokenizer.json"))

    report("prepare_vs_plain_loop", paired(ours, plain, rounds), unit="times the tokens per second", bar=">= 1.0",
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
        bench_batches(folder, rounds, options.quick)
        bench_order(folder, options.quick)
        bench_ahead(folder, rounds)
        bench_prepare(folder, rounds, options.quick)


if __name__ == "__main__":
    sys.exit(main())
