"""Crafted .metadata, blobs and objects: nothing runs, nothing outside is read, the error names what was asked for."""

import collections
import io
import os
import pickle
import pickletools
import random
import time
import zipfile

import pytest
import torch

from fmegatron import interop
from fmegatron.checkpoint import CheckpointError
from fmegatron.interop.inert import Record, UnsafePickle, load
from tests.interop.torch_layout import whole, write


class Runs:
    """Unpickled by Python, it makes a file."""

    def __init__(self, path, function=os.system, argument=None):
        self.function, self.arguments = function, (argument or f"touch {path}",)

    def __reduce__(self):
        return self.function, self.arguments


def attacks(sentinel):
    """Pickles that run something when Python reads them (and one that only harms)."""
    text = str(sentinel)
    yield "posix.system", pickle.dumps(Runs(text))
    yield "builtins.eval", pickle.dumps(Runs(text, eval, f"open({text!r}, 'w')"))
    yield "builtins.exec", pickle.dumps({"state_dict_metadata": [Runs(text, exec, f"open({text!r}, 'w')")]}, 4)
    yield "builtins.getattr", b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR."
    yield "posix.system", b"cposix\nsystem\n(X%c\0\0\0touch %stR." % (len(text) + 6, text.encode())
    yield "instruction b'i'", b"(X%c\0\0\0touch %siposix\nsystem\n." % (len(text) + 6, text.encode())
    yield "instruction b'o'", b"()o."
    yield "instruction b'\\x82'", b"\x80\x02\x82\x01."
    yield "a Global", b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x08\x00\x00\x00__init__K\x01sb."
    yield "is not on the list", b"\x80\x04\x8c\x05torch\x8c\x04load\x93."
    yield "is not on the list", b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n."


@pytest.fixture
def directory(tmp_path):
    x = whole((4, 6), torch.float32)
    write(tmp_path / "c", {"w": (x, [((0, 0), (4, 6))])}, {"o": {"a": 1}})
    return tmp_path / "c"


def test_metadata_that_runs_something(directory, tmp_path):
    sentinel = tmp_path / "was_here"
    for name, data in attacks(sentinel):
        (directory / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            interop.dcp_layouts(directory)
        assert name in str(caught.value), caught.value
        assert not sentinel.exists()


def put_pickle(archive_bytes, data):
    """The torch archive with another data.pkl."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive_bytes)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, data if info.filename.endswith("/data.pkl") else old.read(info))
    return out.getvalue()


def place(directory, metadata_change):
    """Rewrite .metadata: torch's own objects, changed."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata_change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_tensors_and_objects_that_run_something(directory, tmp_path):
    sentinel = tmp_path / "was_here"
    layouts = interop.dcp_layouts(directory)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for name, data in attacks(sentinel):
        for index, info in metadata.storage_data.items():
            old = (directory / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            bad = put_pickle(old, data)
            (directory / "bad").write_bytes(bad)

            def change(value, index=index, bad=bad):
                value.storage_data[index].relative_path = "bad"
                value.storage_data[index].offset, value.storage_data[index].length = 0, len(bad)

            keep = (directory / ".metadata").read_bytes()
            place(directory, change)
            with pytest.raises(ValueError) as caught:
                interop.restore_dcp(directory, layouts) if index.fqn == "w" else interop.read_dcp_object(directory, "o")
            assert name in str(caught.value) or "the global torch" in str(caught.value)
            assert not sentinel.exists()
            (directory / ".metadata").write_bytes(keep)


def test_objects_that_are_not_plain(tmp_path):
    x = whole((2,), torch.float32)
    for i, (value, name) in enumerate(
        [(collections.Counter("ab"), "collections.Counter"), (torch.nn.ReLU(), "torch.nn.modules"), (1j, "complex")]
    ):
        path = tmp_path / str(i)
        write(path, {"w": (x, [((0,), (2,))])}, {"o": value})
        with pytest.raises(UnsafePickle, match=name):
            interop.read_dcp_object(path, "o")
        assert torch.equal(interop.restore_dcp(path, interop.dcp_layouts(path))["w"], x)  # the tensors are there


def test_names_and_sizes_that_lead_elsewhere(directory, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(next(directory.glob("__0_0.distcp")).read_bytes())
    layouts, keep = interop.dcp_layouts(directory), (directory / ".metadata").read_bytes()

    def on_w(**changes):
        def change(metadata):
            for index, info in metadata.storage_data.items():
                for key, value in changes.items() if index.fqn == "w" else ():
                    setattr(info, key, value)

        return change

    def grow(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size([1 << 40, 1 << 20])

    def move(metadata):
        metadata.state_dict_metadata["w"].chunks[0].offsets = torch.Size([1, 0])

    def widen(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.float64

    os.symlink(secret, directory / "link")
    cases = [
        (on_w(relative_path="../secret"), "wanted one in"),
        (on_w(relative_path=str(secret)), "wanted one in"),
        (on_w(relative_path="link"), "cannot be read"),
        (on_w(relative_path="."), "wanted one in"),
        (on_w(offset=1 << 50), "wanted at least"),
        (on_w(length=1 << 50), "wanted at least"),
        (on_w(offset=-5), "whole numbers"),
        (on_w(length=10), "has 10 stored bytes, wanted 96"),
        (grow, "hold 24 of"),
        (move, "outside the tensor"),
        (widen, "float64"),
    ]
    for change, match in cases:
        place(directory, change)
        with pytest.raises(ValueError, match=match):
            interop.restore_dcp(directory, layouts)
        (directory / ".metadata").write_bytes(keep)


def test_bombs_take_no_time(directory):
    layers = b"\x80\x02)" + b"".join(b"2\x86" for _ in range(200))  # a tuple of itself twice, 200 times over
    deep = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999
    big_key = b"\x80\x02}" + layers[2:] + b"K\x01s"
    many = b"\x80\x02r\xff\xff\xff\xff"
    for data in (layers, deep, big_key, many, b"\x80\x02\x8b\xff\xff\xff\x7f", b"\x80\x05\x8e" + b"\xff" * 8):
        (directory / ".metadata").write_bytes(data + b".")
        start = time.process_time()
        with pytest.raises(CheckpointError):
            interop.dcp_layouts(directory)
        assert time.process_time() - start < 1


def fuzz(directory, times, seed):
    file, chance = directory / ".metadata", random.Random(seed)
    good = file.read_bytes()
    marks = [pos for _, _, pos in pickletools.genops(good)]
    refused = 0
    for _ in range(times):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.choice(marks) if chance.random() < 0.5 else chance.randrange(len(bad))
            kind = chance.randrange(3)
            if kind == 0:
                bad[at % len(bad)] = chance.randrange(256)
            elif kind == 1:
                del bad[at : at + chance.randint(1, 4)]
            else:
                bad[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 3)))
        file.write_bytes(bad)
        try:
            interop.restore_dcp(directory, interop.dcp_layouts(directory))
        except ValueError:
            refused += 1
    file.write_bytes(good)
    return refused


def test_fuzzed_metadata(directory):
    assert fuzz(directory, 1000, 0) > 500


@pytest.mark.slow
def test_fuzzed_metadata_long(directory):
    assert fuzz(directory, 20_000, 1) > 10_000


def test_reads_what_python_reads():
    """Plain values of every protocol and opcode that torch and Python write for them."""
    shared = [1, 2]
    value = {
        "ints": [0, 255, 256, 65536, -1, 2**31, -(2**31), 2**100, -(2**300)],
        "more": (None, True, False, 0.1, "é\ud800", b"\0" * 300, "x" * 300, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "nested": {"a": {"b": [{}, [], shared, shared]}},
        5: {("k", 1): "v"},
    }
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(value, protocol)
        allowed = {"_codecs.encode"} if protocol == 2 else ()
        got = load(data, allowed, "here")
        if protocol == 2:  # bytes are a call in protocol 2: told, not made
            assert isinstance(got["more"][5], Record)
            got["more"] = (*got["more"][:5], b"\0" * 300, *got["more"][6:])
        assert got == value and got["nested"]["a"]["b"][2] is got["nested"]["a"]["b"][3]
