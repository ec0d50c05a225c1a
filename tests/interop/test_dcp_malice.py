"""Crafted .metadata, blobs and objects: nothing runs, nothing outside is read, the error names what was asked for."""

import collections
import io
import os
import pickle
import pickletools
import random
import zipfile

import pytest
import torch

from fmegatron import checkpoint, interop
from fmegatron.checkpoint import CheckpointError
from fmegatron.interop.dcp_read import read_dcp_object
from fmegatron.interop.inert import Record, UnsafePickle, load
from fmegatron.layout import Layout, Mesh
from tests.interop.torch_layout import whole, write
from tests.sampling import seeds
from tests.work import counted


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
    yield "os.system", b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR."
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
            checkpoint.layouts(interop.source(directory))
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
    layouts = checkpoint.layouts(interop.source(directory))
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
                if index.fqn == "w":
                    checkpoint.restore(interop.source(directory), layouts)
                else:
                    read_dcp_object(directory, "o")
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
            read_dcp_object(path, "o")
        with pytest.warns(RuntimeWarning, match="no plain values, and were not read: o;"):
            got = checkpoint.restore(interop.source(path))
        assert torch.equal(got["w"], x) and list(got) == ["w"]  # the tensors are there


def test_names_and_sizes_that_lead_elsewhere(directory, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(next(directory.glob("__0_0.distcp")).read_bytes())
    layouts, keep = checkpoint.layouts(interop.source(directory)), (directory / ".metadata").read_bytes()

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
        (on_w(length=10), "got 10 stored bytes for the chunk .*, wanted 96"),
        (grow, "got chunks of 24 elements"),
        (move, "got a chunk outside of the tensor"),
        (widen, "float64"),
    ]
    for change, match in cases:
        place(directory, change)
        with pytest.raises(ValueError, match=match):
            checkpoint.restore(interop.source(directory), layouts)
        (directory / ".metadata").write_bytes(keep)


def budget(work, size):
    """Work in proportion to what is there, counted, so that the time of day changes nothing."""
    assert work.calls < 20_000 + 8 * size and work.read < (1 << 20) + 2 * size and work.memory < 200 << 20, (size, work)


@pytest.mark.parametrize("kind", ["layers", "deep", "key", "memo", "long", "bytes"])
def test_bombs(directory, kind):
    layers = b"\x80\x02)" + b"".join(b"2\x86" for _ in range(200))  # a tuple of itself twice, 200 times over
    data = {
        "layers": layers,
        "deep": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999,
        "key": b"\x80\x02}" + layers[2:] + b"K\x01s",
        "memo": b"\x80\x02r\xff\xff\xff\xff",
        "long": b"\x80\x02\x8b\xff\xff\xff\x7f",
        "bytes": b"\x80\x05\x8e" + b"\xff" * 8,
    }[kind]
    (directory / ".metadata").write_bytes(data + b".")
    with counted() as work, pytest.raises(CheckpointError):
        checkpoint.layouts(interop.source(directory))
    budget(work, len(data))


# ---- shapes that are larger than what is stored


def grown(metadata, shape):
    """The metadata says that the one shard of w has this shape."""
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size(shape)
    entry.chunks[0].offsets = torch.Size([0] * len(shape))
    for index in [index for index in metadata.storage_data if index.fqn == "w"]:
        metadata.storage_data[type(index)("w", entry.chunks[0].offsets)] = metadata.storage_data.pop(index)


def strided_blob(shape, strides):
    """What torch.save writes for a tensor of four elements of storage that is seen with these strides."""
    buffer = io.BytesIO()
    torch.save(torch.arange(4.0).as_strided(shape, strides), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 14, 1 << 14), (1 << 61, 1)])
def test_a_shard_that_is_stored_shorter_than_its_shape(directory, shape):
    """A directory of 5 KiB: refused when it is opened, before anybody allocates what it says."""
    place(directory, lambda metadata: grown(metadata, shape))
    for call in (
        lambda: checkpoint.layouts(interop.source(directory)),
        lambda: checkpoint.restore(interop.source(directory), {"w": Layout(shape, torch.float32, Mesh())}),
        lambda: interop.dcp_to_fmegatron(directory, directory / "out"),
    ):
        with counted() as work, pytest.raises(CheckpointError, match="w: got .* stored bytes for the chunk .*, wanted"):
            call()
        budget(work, 1 << 14)
    assert not (directory / "out").exists()


def fake_length(directory, shape, blob):
    """The metadata's length fits the shape; what lies there is `blob`."""
    (directory / "bad").write_bytes(blob)
    need = torch.Size(shape).numel() * 4

    def change(metadata):
        grown(metadata, shape)
        for index, info in metadata.storage_data.items():
            if index.fqn == "w":
                info.relative_path, info.offset, info.length = "bad", 0, max(need, len(blob))

    place(directory, change)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 14, 1 << 14)])
def test_a_file_that_is_shorter_than_its_metadata_says(directory, shape):
    """Nothing is allocated for it: the file's size is looked at first."""
    fake_length(directory, shape, strided_blob(shape, (0,) * len(shape)))
    for call in (
        lambda: checkpoint.restore(interop.source(directory), checkpoint.layouts(interop.source(directory))),
        lambda: interop.dcp_to_fmegatron(directory, directory / "out"),
    ):
        with counted() as work, pytest.raises(CheckpointError, match="w: its file .*bad has .* bytes, wanted at least"):
            call()
        budget(work, 1 << 14)


def test_elements_that_share_bytes(directory):
    """A sparse file is as long as its metadata says, and holds 4 elements that are seen as 2^20 x 2^8."""
    shape = (1 << 20, 1 << 8)
    fake_length(directory, shape, strided_blob(shape, (0, 0)))
    os.truncate(directory / "bad", 1 << 30)
    layouts = {"w": Layout(shape, torch.float32, Mesh(dp=1 << 20), ("dp",))}  # a rank wants little of it
    place(directory, lambda m: [setattr(i, "length", 1 << 30) for k, i in m.storage_data.items() if k.fqn == "w"])
    # The zip's end is looked for at the end of the place: the blob is moved there.
    blob = strided_blob(shape, (0, 0))
    with open(directory / "bad", "r+b") as f:
        f.seek((1 << 30) - len(blob))
        f.write(blob)
    with counted() as work, pytest.raises(CheckpointError, match="has 16 bytes for a tensor of shape"):
        checkpoint.restore(interop.source(directory), layouts, rank=0)
    budget(work, 1 << 20)


def test_shards_that_lie_in_one_place(directory):
    """Many tensors, each as long as the file, all in the same bytes of it."""

    def change(metadata):
        (index,) = [index for index in metadata.storage_data if index.fqn == "w"]
        for i in range(50):
            metadata.state_dict_metadata[f"w{i}"] = metadata.state_dict_metadata["w"]
            metadata.storage_data[type(index)(f"w{i}", index.offset)] = metadata.storage_data[index]

    place(directory, change)
    with pytest.raises(CheckpointError, match="its file .* bytes, wanted at least"):
        checkpoint.restore(interop.source(directory), checkpoint.layouts(interop.source(directory)))


@pytest.mark.parametrize("kind", ["pipe", "hole", "link", "directory"])
def test_metadata_that_is_no_file(directory, kind):
    file = directory / ".metadata"
    file.rename(directory / "kept")
    {
        "pipe": lambda: os.mkfifo(file),
        "hole": lambda: (file.write_bytes(b"\x80"), os.truncate(file, 1 << 40)),
        "link": lambda: file.symlink_to("/dev/zero"),
        "directory": file.mkdir,
    }[kind]()
    with counted() as work, pytest.raises(CheckpointError, match=".metadata"):
        checkpoint.layouts(interop.source(directory))
    budget(work, 1 << 14)


def test_an_expanded_tensor_in_an_object_is_read(tmp_path):
    """Small ones are what torch.save makes of `x.expand(...)`: right input."""
    x = whole((2,), torch.float32)
    write(tmp_path, {"w": (x, [((0,), (2,))])}, {"o": {"e": torch.tensor([1.5]).expand(100, 3)}})
    got = read_dcp_object(tmp_path, "o")["e"]
    assert got.shape == (100, 3) and bool((got == 1.5).all())


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
        with counted() as work:
            try:
                checkpoint.restore(interop.source(directory), checkpoint.layouts(interop.source(directory)))
            except ValueError:
                refused += 1
        budget(work, 1 << 14)
    file.write_bytes(good)
    return refused


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("fuzzed metadata", 1, 1))
def test_fuzzed_metadata(directory, seed):
    assert fuzz(directory, 500, seed) > 250


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


def test_a_member_of_an_enum_by_its_name():
    """As Python 3.11.0 to 3.11.3 writes it; `getattr` of anything else is refused, and nothing is looked up."""

    def of(what, name="X"):
        return (
            b"\x80\x02cbuiltins\ngetattr\n" + what + b"X" + len(name).to_bytes(4, "little") + name.encode() + b"\x86R."
        )

    found = load(of(b"ctorch\nlayout\n"), {"torch.layout"}, "here")
    assert (found.name, found.args) == ("torch.layout", ("X",))
    for bad in (b"cos\nsystem\n", b"cbuiltins\ngetattr\n", b"N", b"]"):
        with pytest.raises(UnsafePickle, match="refused, nothing was executed"):
            load(of(bad), {"torch.layout"}, "here")
