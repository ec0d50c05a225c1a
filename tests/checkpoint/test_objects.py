"""Object stores: the same promises without a rename. Memory stands for all; S3 is a local server."""

import json
import os
import re
import shutil
from unittest import mock

import pytest
import torch
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.files.keyvalue import KeyValues
from fmegatron.checkpoint.files.leases import Watch
from fmegatron.checkpoint.files.stores import open_store, store_from_json
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh
from tests import sampling
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.faulty import FaultyStorage, FaultyStore, Killed, die_at, full_after, lives
from tests.checkpoint.s3_server import s3_endpoint, s3_store
from tests.checkpoint.test_faults import layouts_on, state
from tests.checkpoint.tokens import files_of

ONE = layouts_on(Mesh(fsdp=1, tp=1))
PUTS = [(KeyValues, name) for name in ("write", "remove", "delete")]


@pytest.fixture(scope="module")
def endpoint():
    with s3_endpoint() as url:
        yield url


@pytest.fixture(autouse=True)
def _tiny(request):
    """Many small objects; fewer where each request is one to a server."""
    sizes = (1024, 256) if "s3" in request.node.name else ()
    with small_sizes(*sizes):
        yield


@pytest.fixture(params=["memory", "s3"])
def store(request, tmp_path):
    if request.param == "memory":
        return open_store("memory://runs/a", {})
    return s3_store(request.getfixturevalue("endpoint"), f"{tmp_path.name}/a")


@pytest.fixture
def memory():
    return open_store("memory://runs/a", {})


def tokens(store):
    return sorted({k.partition("/")[0] for k in store.values.names()})


@pytest.mark.long
def test_saved_and_resharded(store):
    assert save_all(store, state(), layouts_on(), metadata={"loss": 1.5}, step=7) == [None] * 4
    assert_same_bits(checkpoint.restore(store, ONE), state())
    other = layouts_on(Mesh(fsdp=1, tp=2))
    wanted = cut_tree(state(), other)
    got = run(2, lambda world: checkpoint.restore(store, other, world=world))
    for rank in range(2):
        assert_same_bits(got[rank], wanted[rank])
    assert checkpoint.metadata(store) == {"loss": 1.5} and checkpoint.layouts(store) == layouts_on()


@pytest.mark.long
def test_saved_again(store):
    for seed in range(3):
        assert save_all(store, state(seed), layouts_on()) == [None] * 4
        assert_same_bits(checkpoint.restore(store, ONE), state(seed))
        assert len(tokens(store)) == 2 and "COMPLETE" in tokens(store)  # nothing of the one before is left


def test_a_token_is_a_checkpoint_by_itself(memory, tmp_path):
    """Copied to a directory it is what a save to that directory would have been."""
    checkpoint.save(memory, state(), ONE)
    storage = memory.locate()
    for name in storage.names():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(storage.read(name))
    checkpoint.save(tmp_path / "direct", state(), ONE)
    direct = files_of(tmp_path / "direct")
    for path in (p for p in direct.rglob("*") if p.is_file()):
        assert (tmp_path / "copy" / path.relative_to(direct)).read_bytes() == path.read_bytes()
    shutil.rmtree(tmp_path / "direct")
    assert_same_bits(checkpoint.restore(tmp_path / "copy", ONE), state())
    other = open_store("memory://copied", {})  # and the directory, copied into a bucket by a tool that knows nothing
    for path in (p for p in (tmp_path / "copy").rglob("*") if p.is_file()):
        other.values.write(str(path.relative_to(tmp_path / "copy")), [path.read_bytes()])
    assert_same_bits(checkpoint.restore(other, ONE), state())
    checkpoint.save(other, state(1), ONE)
    assert_same_bits(checkpoint.restore(other, ONE), state(1))
    assert len(tokens(other)) == 2


def test_missing(store):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.restore(store, ONE)
    assert not store.is_complete()


# ---- damage


def damaged(store, key, data):
    """The store with one object changed, for the time of a restore; the error that comes, or None."""
    before = store.values.read(key)
    store.values.write(key, [data]) if data is not None else store.values.remove(key)
    try:
        got = checkpoint.restore(store, ONE)
    except CheckpointError as error:
        return error
    finally:
        store.values.write(key, [before])
    assert_same_bits(got, state(), key)


@pytest.mark.medium
def test_damage_is_named(store):
    """Every object: flipped, shorter, longer, emptied, gone: an error that names the leaf, or (in padding) no harm."""
    assert save_all(store, state(), layouts_on()) == [None] * 4
    keys = [k for k in store.values.names() if "/" in k]
    for key in keys if "memory" in store.text else keys[sampling.seed() % 10 :: 10]:
        data, (_, *kind) = store.values.read(key), key.split("/")
        for change in (bytes([data[0] ^ 1]) + data[1:], data[:-1], data + b"\0", b"", None):
            error = damaged(store, key, change)
            if kind[0] in ("arrays", "pieces") and kind[-1].startswith("c"):
                assert f"{kind[1]}: its chunk file" in str(error), (key, len(change or b""), error)
            elif kind[-1] in ("COMPLETE", "manifest.json", "digests.bin") and change != data + b"\0":
                assert error is not None, (key, change)


def test_a_longer_chunk(memory):
    checkpoint.save(memory, state(), ONE)
    key = next(k for k in memory.values.names() if "arrays/w/c." in k)
    assert "w: its chunk file memory://runs/a/" in str(damaged(memory, key, memory.values.read(key) + b"\0"))


@pytest.mark.parametrize("root", ["..", "0123456789abc", 3, None, "other/a", ["x"]])
def test_a_changed_pointer(memory, root):
    checkpoint.save(memory, state(), ONE)
    pointer = json.loads(memory.values.read("COMPLETE"))
    error = damaged(memory, "COMPLETE", json.dumps({**pointer, "root": root}).encode())
    assert "COMPLETE" in str(error)
    for text in (b"", b"[]", b"nonsense", b"[" * 4000):
        assert "COMPLETE" in str(damaged(memory, "COMPLETE", text))


# ---- a save that dies


def test_pointer_and_token_state_one_manifest(memory):
    """A pointer whose digest was altered, or that of another save: neither what it names nor what it says is taken."""
    checkpoint.save(memory, state(), ONE)
    pointer = json.loads(memory.values.read("COMPLETE"))
    error = damaged(memory, "COMPLETE", json.dumps({**pointer, "manifest_xxh3_64": "0" * 16}).encode())
    assert "as its pointer says; one of them was altered" in str(error)


@pytest.fixture
def die():
    with lives() as end:
        yield end


@pytest.mark.long
@pytest.mark.parametrize("existing", [True, False], ids=["again", "first"])
def test_killed_at_every_moment(monkeypatch, die, existing):
    """Old or new, bit for bit, whatever the last request was; the next save works and leaves nothing behind."""
    seen = set()
    for moment in range(1, 400):
        store = open_store("memory://runs/a", {})
        if existing:
            checkpoint.save(store, state(0), ONE)

        with monkeypatch.context() as patch:
            done = die_at(patch, moment, PUTS)
            try:
                checkpoint.save(store, state(1), ONE)
            except Killed:
                pass
        die()
        try:
            got = checkpoint.restore(store, ONE)
            version = int(torch.equal(got["w"], state(1)["w"]))
            assert_same_bits(got, state(version), moment)
            seen.add(version)
        except CheckpointError as error:
            assert not existing and "COMPLETE" in str(error)
            seen.add(0)
        checkpoint.save(store, state(2), ONE)
        assert_same_bits(checkpoint.restore(store, ONE), state(2))
        assert len(tokens(store)) == 2
        if done[0] < moment:
            break
    assert seen == {0, 1} and moment > 20


@pytest.mark.long
def test_an_error_on_one_rank_ends_all(store):
    assert save_all(store, state(0), layouts_on()) == [None] * 4
    bad, local = FaultyStore(store, lambda s: FaultyStorage(s, full_after(1))), cut_tree(state(1), layouts_on())
    got = run(
        4, lambda world: checkpoint.save(bad if world.rank == 2 else store, local[world.rank], layouts_on(), world)
    )
    assert all(isinstance(e, RuntimeError) and "rank 2 of 4" in str(e) and "No space left" in str(e) for e in got)
    assert_same_bits(checkpoint.restore(store, ONE), state(0))
    assert len(tokens(store)) == 2


def test_reads_that_fail(store):
    assert save_all(store, state(0), layouts_on()) == [None] * 4

    def broken(operation, name):
        if operation == "open" and name.startswith("arrays/w"):
            raise OSError(5, "Input/output error")

    bad = FaultyStore(store, lambda s: FaultyStorage(s, broken))
    target = layouts_on(Mesh(fsdp=1, tp=2))
    got = run(2, lambda world: checkpoint.restore(bad if world.rank == 1 else store, target, world=world))
    assert all(isinstance(e, RuntimeError) and not isinstance(e, CheckpointError) for e in got)
    assert all(f"'w: {store.text}/" in str(e) and "Input/output error; whether it is good" in str(e) for e in got)


def test_a_server_that_refuses(endpoint):
    store = s3_store(endpoint, "a")
    quick = {**store.options, "context": {"s3_request_retries": {"max_retries": 1, "initial_delay": "1ms"}}}
    layouts = {"x": Layout((3,), torch.float32, Mesh())}
    with pytest.raises(RuntimeError, match="NoSuchBucket"):
        checkpoint.save(open_store("s3://other/a", quick), {"x": torch.ones(3)}, layouts)
    dead = {**quick, "endpoint": "http://127.0.0.1:9"}
    with pytest.raises(RuntimeError, match="saving the checkpoint s3://ckpt/a failed"):
        checkpoint.save(open_store("s3://ckpt/a", dead), {"x": torch.ones(3)}, layouts)


def test_no_request_has_a_condition(endpoint, monkeypatch):
    """A store without conditional puts is as good: of two savers one wins because each looks after its put."""
    asked, real = [], DomainDispatcherApplication.__call__

    def call(self, environ, start):
        asked.append({key for key in environ if key.startswith("HTTP_IF_")} or environ["REQUEST_METHOD"])
        return real(self, environ, start)

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", call)
    store = s3_store(endpoint, "plain/step_00000001")
    for version in (1, 2):
        checkpoint.save(store, {"x": torch.full((64, 8), version)}, {"x": Layout((64, 8), torch.int64, Mesh())})
    store.withdraw().delete()
    assert set(asked) == {"GET", "PUT", "DELETE"}


def test_what_is_no_checkpoint_is_not_replaced(memory):
    memory.values.write("thesis.tex", [b"years of work"])
    with pytest.raises(ValueError, match="got a place that holds .*choose another URL"):
        checkpoint.save(memory, state(), ONE)
    assert memory.values.names() == ["thesis.tex"]


# ---- directories of checkpoints


@pytest.mark.long
def test_children(store):
    folder = store.inner if hasattr(store, "inner") else store
    for name in ("step_00000001", "step_00000002"):
        checkpoint.save(store.child(name), state(), ONE)
    assert store.children() == ["step_00000001", "step_00000002"]
    assert all(store.child(name).is_complete() for name in store.children())
    gone = store.child("step_00000001").withdraw()
    assert not store.child("step_00000001").is_complete() and gone.place.files("").names()
    gone.delete()
    assert store.children() == ["step_00000002"] and not folder.child("step_00000001").values.names()
    alive = store.child("step_00000004").begin()
    alive.write("arrays/w/c.0", [b"half"])
    for name in ("step_00000003", "step_00000002"):
        store.child(name).begin().write("arrays/w/c.0", [b"half"])  # killed
    store.clean(r"step_\d+", ["step_00000002"], Watch())
    assert store.children() == ["step_00000002", "step_00000004"]
    store.clean(r"step_\d+", (), Watch())
    assert store.children() == ["step_00000002", "step_00000004"]
    alive.lease.drop()
    store.clean(r"step_\d+", (), Watch())
    assert store.children() == ["step_00000002"]
    assert len(tokens(store.child("step_00000002"))) == 2
    assert_same_bits(checkpoint.restore(store.child("step_00000002"), ONE), state())


@pytest.mark.long
def test_a_manager(store):
    """Steps, tracker, retention, and the way back past a damaged step, on a URL."""
    with Manager(store, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), ONE)
    assert manager.steps() == [2, 3] and manager.latest() == 3 and read_latest(store).step == 3
    assert not store.child("step_00000001").values.names()
    assert_same_bits(manager.restore_latest(ONE)[1], state(3))
    newest = store.child("step_00000003")
    newest.values.remove(next(k for k in newest.values.names() if k.endswith("/digests.bin")))
    with pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 3"):
        step, got, _ = Manager(store).restore_latest(ONE)
    assert step == 2
    assert_same_bits(got, state(2))


# ---- values


def test_another_process_makes_the_same_store(endpoint, tmp_path):
    for store in (s3_store(endpoint, "j/a"), open_store(tmp_path / "c")):
        again = store_from_json(json.loads(json.dumps(store.to_json())))
        assert again == store and type(again) is type(store)
        checkpoint.save(store, state(), ONE)
        assert_same_bits(checkpoint.restore(again, ONE), state())


def test_paths_and_urls(tmp_path):
    assert open_store(f"file://{tmp_path}/a%20b").text == f"{tmp_path}/a b"
    assert open_store("gs://bucket/x/y").values.spec == {"driver": "gcs", "bucket": "bucket", "path": "x/y/"}
    assert open_store("s3://bucket").values.spec == {"driver": "s3", "bucket": "bucket", "path": ""}
    for bad in ("http://x/y", "s3:///x", "s3://b//x", "s3://b/../x", "file://host/x", "memory://a"):
        with pytest.raises(ValueError, match=re.escape(bad)):
            open_store(bad)
    with pytest.raises(ValueError, match="wanted none for a directory"):
        open_store(tmp_path, {"endpoint": "x"})


# ---- real processes


def save_on_s3(rank, endpoint):
    mesh = Mesh(fsdp=2, tp=1)
    layouts = {"w": Layout((256, 512), torch.float32, mesh, ("fsdp",)), "n": Layout((), torch.int64, mesh)}
    x = torch.arange(256 * 512.0).view(256, 512)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}  # the pool's processes are older than the server
    with mock.patch.dict(os.environ, keys), connect(mesh, device="cpu") as world:
        store = s3_store(endpoint, "real/a")
        checkpoint.save(store, {"w": x[rank * 128 : rank * 128 + 128], "n": torch.tensor(5)}, layouts, world)
        got = checkpoint.restore(store, layouts, world=world)
        return torch.equal(got["w"], x[rank * 128 : rank * 128 + 128]) and int(got["n"]) == 5


@pytest.mark.medium
def test_two_real_ranks(ranks, endpoint):
    assert ranks.run(save_on_s3, endpoint, ranks=2) == [True, True]
