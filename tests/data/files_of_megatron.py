"""megatron-core's own builder, reader and GPTDataset on files of a test; a program of the peers' environment.

    PYTHON tests/data/files_of_megatron.py FOLDER      (PYTHON: .venv-peers/bin/python)

For each FOLDER/NAME.npz (tokens, lengths of sequences, sequences of each document, perhaps modes) it writes NAME.theirs
with IndexedDatasetBuilder, and reads that pair and NAME.ours, which must be equal to the arrays. Those of uint16
without modes are put together in merged.theirs. For each line of FOLDER/orders.json (corpus, sequences, seed, samples,
extra_token, drop_last, seq_len) all samples of a GPTDataset go to FOLDER/samples.npz, by the line's number; for each of
FOLDER/weights.json its choices of 2,000 samples of a blend, [2, 2000]: the source, and which sample of it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch


class Tokenizer:
    """What GPTDataset asks a tokenizer: its size, the id that ends a document, and what names it."""

    vocab_size, eod, unique_identifiers = 60_000, 65_535, {"class": "Tokenizer"}


def build(prefix: str, given: dict, one_by_one: bool) -> None:
    """Write a pair by the builder: whole documents, or one sequence after the other."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    ids, modes = given["ids"], given["modes"].tolist() if "modes" in given else None
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=ids.dtype.type, multimodal=modes is not None)
    at = first = 0
    for count in given["documents"].tolist():
        lengths = given["lengths"][first : first + count].tolist()
        marks = modes[first : first + count] if modes else [0] * count
        if one_by_one:
            for length, mode in zip(lengths, marks, strict=True):
                builder.add_item(torch.from_numpy(ids[at : at + length].astype(np.float64)), mode)
                at += length
            builder.end_document()
        else:
            builder.add_document(ids[at : at + sum(lengths)], lengths, marks)
            at += sum(lengths)
        first += count
    builder.finalize(f"{prefix}.idx")


def check(prefix: str, given: dict) -> None:
    """The pair as megatron-core reads it is what was given."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = IndexedDataset(prefix, multimodal="modes" in given, mmap=len(given["ids"]) > 0)  # it cannot map nothing
    at = 0
    assert np.array_equal(found.document_indices, np.cumsum([0, *given["documents"]])), prefix
    assert np.array_equal(found.sequence_lengths, given["lengths"]), prefix
    for i, length in enumerate(given["lengths"].tolist()):
        got = found[i][0] if "modes" in given else found[i]
        assert got.dtype == given["ids"].dtype and np.array_equal(got, given["ids"][at : at + length]), (prefix, i)
        assert "modes" not in given or found[i][1] == given["modes"][i], (prefix, i)
        at += length
    assert at == len(given["ids"]), prefix


def samples(folder: Path, line: dict, cache: Path) -> np.ndarray:
    """All samples of a GPTDataset in its order, [n, S + 1]: tokens, and the last label."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    prefix = str(folder / line["corpus"])
    config = GPTDatasetConfig(
        random_seed=line["seed"], sequence_length=line["seq_len"], blend=([prefix], None), split="1,0,0",
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, add_extra_token_to_sequence=line["extra_token"],
        drop_last_partial_validation_sequence=line["drop_last"], path_to_cache=str(cache),
    )  # fmt: skip
    chosen = np.arange(*line["sequences"], dtype=np.int32)
    split = Split.train if line["drop_last"] else Split.valid
    tokens = GPTDataset.build_low_level_dataset(prefix, config)
    data = GPTDataset(tokens, prefix, chosen, line["samples"], split, config)
    rows = [data[i] for i in range(len(data.shuffle_index))]
    return np.stack([torch.cat([row["tokens"], row["labels"][-1:]]).numpy() for row in rows])


def main(folder: Path) -> None:
    """Write and check what the folder asks for."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.datasets.utils import normalize

    merged = IndexedDatasetBuilder(str(folder / "merged.theirs.bin"), dtype=np.uint16)
    for number, path in enumerate(sorted(folder.glob("*.npz"))):
        given, prefix = dict(np.load(path)), str(path.with_suffix(""))
        build(f"{prefix}.theirs", given, bool(number % 2))
        for whose in ("theirs", "ours"):
            check(f"{prefix}.{whose}", given)
        if given["ids"].dtype == np.uint16 and "modes" not in given:
            merged.add_index(f"{prefix}.theirs")
    merged.finalize(str(folder / "merged.theirs.idx"))
    lines = json.loads((folder / "orders.json").read_text())
    found = {}
    for number, line in enumerate(lines):  # a cache each: its names do not tell all that the index depends on
        found[str(number)] = samples(folder, line, folder / f"cache{number}")
    for number, weights in enumerate(json.loads((folder / "weights.json").read_text())):
        which, sample = np.zeros(2000, np.int16), np.zeros(2000, np.int64)
        weights = normalize(normalize(weights))  # by BlendedMegatronDatasetBuilder, and by BlendedDataset again
        helpers.build_blending_indices(which, sample, weights, len(weights), 2000, False)
        found[f"blend{number}"] = np.stack([which, sample])
    np.savez(folder / "samples.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
