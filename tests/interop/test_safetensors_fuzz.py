"""Hostile headers and indexes of safetensors: an error or the right elements; never a crash, a read outside, a bomb."""

import json
import os
import random
import struct
import tracemalloc

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fmegatron import checkpoint, interop
from fmegatron.checkpoint import CheckpointError
from tests.interop.hf_folder import write
from tests.pairs import few
from tests.sampling import seeds

CASES = 10_000  # in all; a sample of them runs in `make test`
GROUP = 100
INDEX = "model.safetensors.index.json"


def header(path):
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def put_header(path, value, body, length=None):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    path.write_bytes(struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + body)


ODD = (None, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, float("inf"), True, "", "x", [], [[]], {}, [1] * 70, "BF16")
NAMES = ("../secret", "/etc/passwd", "..", ".", "", "a/b", "\0", "no", "model.safetensors\0", "x" * 300, "link", INDEX)


def odd(draw):
    return draw.choice((*ODD, *(draw.randrange(-(2**66), 2**66) for _ in range(3))))


def fuzz_header(draw, path):
    entries, body = header(path)
    names = [name for name in entries if name != "__metadata__"]
    name = draw.choice(names)
    entry = dict(entries[name])
    kind = draw.randrange(12)
    if kind == 0:
        data = bytearray(path.read_bytes())
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data) - len(body))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    elif kind == 1:
        path.write_bytes(path.read_bytes()[: draw.randrange(len(body) + 400)])
    elif kind == 2:
        put_header(path, entries, body, draw.choice((0, 1, 2, 7, 2**62, 2**63, 2**64 - 1, draw.randrange(10**5))))
    elif kind == 3:
        entry["shape"] = draw.choice((odd(draw), [odd(draw)], [odd(draw), 1], [2**32, 2**32], [*entry["shape"], 0]))
        put_header(path, {**entries, name: entry}, body)
    elif kind == 4:
        entry["dtype"] = draw.choice((odd(draw), "F4", "bf16", "F32", "I8"))
        put_header(path, {**entries, name: entry}, body)
    elif kind == 5:
        first, last = entry["data_offsets"]
        by = draw.choice((1, 2, -2, 64, last - first, 2**40))
        entry["data_offsets"] = draw.choice(([first + by, last + by], [first, last + by], [last, first], odd(draw)))
        put_header(path, {**entries, name: entry}, body)
    elif kind == 6:
        other = draw.choice(names)
        put_header(path, {**entries, name: entries[other], other: entries[name]}, body)
    elif kind == 7:
        put_header(path, {**entries, draw.choice(("__metadata__", name)): odd(draw)}, body)
    elif kind == 8:
        text = json.dumps(entries)
        put_header(path, (text[:-1] + f', "{name}": {json.dumps(entry)}}}').encode(), body)  # a key twice
    elif kind == 9:
        put_header(path, draw.choice((b"[" * 5000, b"{" + b'"a":{' * 5000, b"[]", b"NaN", b"\xff\xfe{}")), body)
    elif kind == 10:
        del entries[name]
        put_header(path, entries, body)
    else:
        put_header(path, entries, body + bytes(draw.randrange(1, 9)))


def fuzz_index(draw, path):
    index = json.loads(path.read_text())
    table, kind = index["weight_map"], draw.randrange(6)
    name = draw.choice(list(table))
    if kind == 0:
        data = bytearray(path.read_bytes())
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    elif kind == 1:
        path.write_text(json.dumps({**index, "weight_map": {**table, name: draw.choice((*NAMES, odd(draw)))}}))
    elif kind == 2:
        path.write_text(json.dumps({**index, "weight_map": odd(draw)}))
    elif kind == 3:
        path.write_bytes(path.read_bytes()[: draw.randrange(400)])
    elif kind == 4:
        path.write_text(json.dumps({**index, "weight_map": {**table, name: draw.choice(list(table.values()))}}))
    else:
        path.write_text(json.dumps({**index, "weight_map": {**table, "more": draw.choice(list(table.values()))}}))


def as_the_package_reads(folder):
    """name -> tensor, of the files in the index; None where the safetensors package refuses one."""
    found = {}
    for file in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())):
        try:
            with safe_open(folder / file, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
        except (SafetensorError, ValueError, OSError, RuntimeError, TypeError, OverflowError):
            return None
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "a"
    write(folder, shards=2, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
          num_key_value_heads=2, vocab_size=9)  # fmt: skip
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("group", few(1, [(i,) for i in range(CASES // GROUP)], map(str, range(CASES // GROUP))))
def test_fuzzed_headers_and_indexes(original, tmp_path, group, monkeypatch):
    folder, outside, opened, os_open = tmp_path / "a", [], [], os.open
    (tmp_path / "secret").write_bytes(original["model-00001-of-00002.safetensors"])
    folder.mkdir()
    size = sum(map(len, original.values()))

    def watched(path, *more, **options):
        opened.append(os.path.abspath(path))
        return os_open(path, *more, **options)

    refused = 0
    for case in range(GROUP):
        draw = random.Random(f"{group} {case} {seeds('safetensors', 0, 1)[0]}")
        for name, data in original.items():
            (folder / name).write_bytes(data)
        if draw.random() < 0.3:
            fuzz_index(draw, folder / INDEX)
        else:
            fuzz_header(draw, folder / draw.choice([n for n in original if n.endswith(".safetensors")]))
        grown = sum(file.stat().st_size for file in folder.iterdir()) - size  # a header that says more: its text
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", watched)
            tracemalloc.start()
            try:
                got = checkpoint.restore(interop.source(folder))
            except CheckpointError as error:
                got, refused = None, refused + 1
                assert str(folder) in str(error), error
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        assert peak < 60 * size + 10 * max(0, grown), (group, case, peak, size, grown)
        outside += [path for path in opened if not path.startswith(f"{folder}/")]
        if got is not None:
            wanted = as_the_package_reads(folder)
            assert wanted is not None and set(got) == set(wanted), (group, case)
            assert all(torch.equal(x.view(-1).view(torch.uint8), wanted[n].view(-1).view(torch.uint8))
                       for n, x in got.items()), (group, case)  # fmt: skip
    assert not outside and opened and refused > GROUP // 2, (outside, refused)


def test_what_is_refused_by_name(original, tmp_path):
    folder = tmp_path / "a"

    def fresh():
        folder.mkdir(exist_ok=True)
        for name, data in original.items():
            (folder / name).write_bytes(data)
        return folder / "model-00001-of-00002.safetensors", folder / INDEX

    def refused(match):
        with pytest.raises(CheckpointError, match=match):
            checkpoint.describe(interop.source(folder))

    file, _ = fresh()
    entries, body = header(file)
    first, second = list(entries)[1:3]
    put_header(file, {**entries, first: entries[second]}, body)
    refused("without a gap|not its|wanted")
    file, index = fresh()
    index.write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    refused("only names without folders are read")
    file, index = fresh()
    table = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**table, "more": "model-00001-of-00002.safetensors"}}))
    refused("more: got no such tensor in model-00001")
    file, index = fresh()
    file.unlink()
    os.mkfifo(file)
    refused("is no regular file")


def test_one_file_beside_an_index_is_what_transformers_reads(tmp_path):
    """An older save in the same folder: told, and the same tensors are read."""
    folder = tmp_path / "both"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    save_file({"a": torch.zeros(2)}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.warns(UserWarning, match="got model.safetensors and model.safetensors.index.json, .* remove the one"):
        found = checkpoint.restore(interop.source(folder))
    assert found["a"].tolist() == [1, 1]
