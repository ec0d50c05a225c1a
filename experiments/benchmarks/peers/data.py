"""One peer of the data benchmark as a process of its own: batches and indices on stdin, processor seconds on stdout.

    PYTHON experiments/benchmarks/peers/data.py megatron|grain|torchdata CORPUS ROWS LENGTH SEED FOLDER

PYTHON is an interpreter that has the peer (`make bench-peers-env` builds one); fmegatron is not imported. CORPUS is a
.bin/.idx pair of uint16. A line `batches BEGIN COUNT` reads so many batches, `labels N` answers a checksum of those of
batch N, `order CORPUS` builds the index of another corpus (Megatron alone). Each is used as its documentation says:

- megatron: megatron-core's GPTDataset with its C++ helpers, without attention masks (4 MiB a sample otherwise), and
  torch's DataLoader with a batch sampler, as Megatron's training has it, without workers;
- grain: MapDataset.source(...).seed(...).shuffle().repeat().batch(...), read by number, which is faster than its
  iterator;
- torchdata: StatefulDataLoader(source, shuffle=True), without workers.
"""

import itertools
import os
import shutil
import sys
import time
import zlib

import numpy as np
import torch


class Windows:
    """The windows of LENGTH + 1 tokens of a mapped .bin, as a source of items."""

    def __init__(self, corpus: str, length: int):
        self.ids, self.length = np.asarray(np.memmap(f"{corpus}.bin", np.uint16, "r")), length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, number):
        start = number * self.length
        return self.ids[start : start + self.length + 1].astype(np.int64)


class Tokenizer:
    """What GPTDataset asks a tokenizer: its size and the id that ends a document."""

    vocab_size, eod, unique_identifiers = 50_000, 50_001, {"class": "Tokenizer"}


def megatron(corpus: str, rows: int, length: int, seed: int, folder: str):
    """(batches(begin, count) -> iterator, order(corpus): the building of an index)."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    cache = os.path.join(folder, "megatron-cache")

    def dataset(prefix):
        config = GPTDatasetConfig(
            random_seed=seed, sequence_length=length, blend=([prefix], None), split="1,0,0", path_to_cache=cache,
            tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
            create_attention_mask=False,
        )  # fmt: skip
        indexed = GPTDataset.build_low_level_dataset(prefix, config)
        numbers = np.arange(GPTDataset.numel_low_level_dataset(indexed), dtype=np.int32)
        return GPTDataset(indexed, prefix, numbers, None, Split.train, config)

    samples = dataset(corpus)

    def batches(begin, count):
        sampler = [list(range(n * rows, n * rows + rows)) for n in range(begin, begin + count)]
        return torch.utils.data.DataLoader(samples, batch_sampler=sampler)

    def order(prefix):
        shutil.rmtree(cache)
        dataset(prefix)

    return batches, order


def grain(corpus: str, rows: int, length: int, seed: int, folder: str):
    """As `megatron`, without an index."""
    from grain import MapDataset

    samples = MapDataset.source(Windows(corpus, length)).seed(seed).shuffle().repeat().batch(rows)
    return lambda begin, count: (samples[n] for n in range(begin, begin + count)), None


def torchdata(corpus: str, rows: int, length: int, seed: int, folder: str):
    """As `megatron`, without an index; it only goes on, wherever it shall begin."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(seed)
    loader = StatefulDataLoader(Windows(corpus, length), batch_size=rows, shuffle=True)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda begin, count: itertools.islice(endless, count), None


def main(peer: str, corpus: str, rows: str, length: str, seed: str, folder: str) -> None:
    """Answer lines until stdin ends."""
    answer = os.fdopen(os.dup(1), "w", 1)  # libraries print; what they print goes to stderr
    os.dup2(2, 1)
    torch.set_num_threads(1)
    make = {"megatron": megatron, "grain": grain, "torchdata": torchdata}[peer]
    batches, order = make(corpus, int(rows), int(length), int(seed), folder)
    next(iter(batches(0, 1)))
    answer.write("ready\n")
    for line in sys.stdin:
        what, *given = line.split()
        if what == "labels":
            answer.write(f"{zlib.crc32(next(iter(batches(int(given[0]), 1)))['labels'].numpy())}\n")
            continue
        start = time.process_time()
        if what == "order":
            order(*given)
        else:
            for _ in batches(*map(int, given)):
                pass
        answer.write(f"{time.process_time() - start}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
