"""prepare: the same corpus from every kind of file, part size and number of processes; stopped runs go on."""

import gzip
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from fmegatron.data import (  # fmt: skip
    Batches,
    ByteTokenizer,
    CharTokenizer,
    IndexedTokens,
    load_packing,
    texts,
    write_indexed,
)
from fmegatron.data.__main__ import main
from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.indexed_writer import merge_indexed
from fmegatron.data.prepare import prepare
from fmegatron.data.texts import Part, parts_of, texts_of

TEXTS = [f"Text {i}: " + "naïve — 漢字 " * (i % 7) for i in range(60)] + ["", "last"]
module = importlib.import_module("fmegatron.data.prepare")


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": t, "id": i}, ensure_ascii=i % 2 > 0) + "\n" * (1 + i % 3)
                            for i, t in enumerate(TEXTS)))  # fmt: skip
    return path


def wanted(eod=None):
    end = [] if eod is None else [eod]
    return [list(t.encode()) + end for t in TEXTS]


def documents(tokens):
    return [tokens[slice(*tokens.document(i))].tolist() for i in range(tokens.documents)]


def test_lines_are_cut_anywhere(lines, tmp_path):
    """Each line is read once, however the file is cut."""
    for size in (1, 7, 100, 1000, 10**6):
        parts = parts_of(lines, size)
        assert [t for part in parts for t in texts_of(part, "text")] == TEXTS
    (tmp_path / "empty.jsonl").write_text("")
    assert [list(texts_of(part, "text")) for part in parts_of(tmp_path / "empty.jsonl", 9)] == [[]]


@pytest.mark.parametrize("part_bytes", [300, 1 << 20])
def test_a_corpus(lines, tmp_path, part_bytes):
    seen = []
    facts = prepare([lines], tmp_path / "out" / "c", eod=256, part_bytes=part_bytes, split="8,1,1",
                    progress=lambda *now: seen.append(now))  # fmt: skip
    tokens = IndexedTokens(tmp_path / "out" / "c", verify=True)
    assert documents(tokens) == wanted(256) and tokens.dtype == np.uint16
    assert (facts["tokens"], facts["documents"]) == (len(tokens), 62) and seen[-1] == (seen[-1][1],) * 2 + (
        len(tokens),
    )
    assert facts["text_bytes"] == sum(len(t.encode()) for t in TEXTS) and facts["document_tokens"]["empty"] == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["c.bin", "c.idx", "c.json"]
    split = module.facts_of(tmp_path / "out" / "c")["split"]
    assert split["train"][0] == 0 and split["test"][1] == len(tokens) and split["valid"][0] == split["train"][1]
    starts = set(tokens.document_starts().tolist())
    assert {x for pair in split.values() for x in pair} <= starts and abs(split["train"][1] / len(tokens) - 0.8) < 0.1
    assert Batches(tokens, 2, 32, 0, split=tuple(split["train"]), documents=True).at(0)["mask"].shape == (2, 32)


def test_other_kinds(tmp_path, lines):
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": t}) + "\n" for t in TEXTS)
    (tmp_path / "c.txt").write_text("one text\nof two lines")
    prepare([tmp_path / "b.jsonl.gz"], tmp_path / "b", key="body")
    assert documents(IndexedTokens(tmp_path / "b")) == wanted()
    prepare([tmp_path / "c.txt", lines], tmp_path / "c")
    assert documents(IndexedTokens(tmp_path / "c")) == [list(b"one text\nof two lines"), *wanted()]


def test_a_stopped_run_goes_on(lines, tmp_path, monkeypatch):
    calls, real = [], module.tokenize_part

    def stops(number, *more):
        calls.append(number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(number, *more)

    monkeypatch.setattr(module, "tokenize_part", stops)
    with pytest.raises(KeyboardInterrupt):
        prepare([lines], tmp_path / "c", part_bytes=400)
    assert not (tmp_path / "c.idx").exists()
    with pytest.raises(ValueError, match=r"c.parts: got parts of another call \(eod differ\), .* or --fresh"):
        prepare([lines], tmp_path / "c", part_bytes=400, eod=3)
    prepare([lines], tmp_path / "c", part_bytes=400)
    assert documents(IndexedTokens(tmp_path / "c")) == wanted() and calls[:4] == [0, 1, 2, 3]
    assert sorted(calls[4:]) == list(range(3, max(calls) + 1))
    with pytest.raises(KeyboardInterrupt):
        calls.clear()
        prepare([lines], tmp_path / "c", part_bytes=400)
    prepare([lines], tmp_path / "c", part_bytes=400, eod=3, fresh=True)
    assert documents(IndexedTokens(tmp_path / "c")) == wanted(3) and not (tmp_path / "c.parts").exists()


@pytest.mark.parametrize("stop", ["fingerprint", "replace", "rmtree"])
@pytest.mark.parametrize("links", [True, False])
def test_a_run_of_one_part_that_was_stopped_at_its_end_goes_on(lines, tmp_path, monkeypatch, stop, links):
    """Before PREFIX.json, between PREFIX.bin and PREFIX.idx, while the parts are removed."""
    clean = prepare([lines], tmp_path / "clean")

    def stops(path, *more):
        if stop == "fingerprint" or stop == "replace" and str(more[0]).endswith("one.idx"):
            raise KeyboardInterrupt
        if stop == "replace":
            return real(path, *more)
        (path / "plan.json").unlink()
        (path / "000000.bin").unlink()
        raise KeyboardInterrupt

    def refused(*_):
        raise OSError("no links here")

    place = {"fingerprint": module, "replace": os, "rmtree": module.shutil}[stop]
    real = getattr(place, stop)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, stop, stops)
        if not links:
            patch.setattr(os, "link", refused)
        prepare([lines], tmp_path / "one")
    again = prepare([lines], tmp_path / "one")
    assert {**again, "seconds": 0} == {**clean, "seconds": 0}
    for kind in ("bin", "idx", "json"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"clean.{kind}").read_bytes()
    names = [f"{name}.{kind}" for name in ("clean", "one") for kind in ("bin", "idx", "json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.jsonl", *names])


def test_facts_are_of_the_corpus_that_is_there(lines, tmp_path):
    for name, tokenizer in (("a", "byte"), ("b", "byte"), ("c", str(tmp_path / "chars.json"))):
        if name == "c":
            CharTokenizer.from_text("".join(TEXTS)).save(tokenizer)
        prepare([lines], tmp_path / name, tokenizer, eod=len(name))
    a, b, c = (tmp_path / name for name in "abc")
    with pytest.raises(
        ValueError, match=r"/a of the tokenizer 'byte' .*/c of 'char' .*wanted corpora of one tokenizer"
    ):
        merge_indexed(tmp_path / "d", [a, b, c])
    assert not (tmp_path / "d.idx").exists() and main(["merge", str(tmp_path / "d"), str(a), str(c)]) == 2
    merge_indexed(a, [a, b])
    facts, tokens = module.facts_of(a), IndexedTokens(a)
    assert (facts["documents"], facts["tokens"], facts["eod"]) == (124, len(tokens), 1)
    assert tokens.tokenizer == ByteTokenizer() and facts["digest"] == fingerprint(tokens)
    write_indexed(tmp_path / "plain", [[1, 2]], "uint16")
    merge_indexed(b, [b, tmp_path / "plain"])  # of which one states none
    assert not (tmp_path / "b.json").exists() and IndexedTokens(b).tokenizer is None
    write_indexed(c, [[1, 2]], "uint16")
    assert not (tmp_path / "c.json").exists()
    (tmp_path / "plain.json").write_text('{"text": "of the user"}')
    write_indexed(tmp_path / "plain", [[3]], "uint16")
    assert (tmp_path / "plain.json").exists(), "a file of something else was removed"


@pytest.mark.slow
def test_processes(lines, tmp_path):
    one = prepare([lines], tmp_path / "one", part_bytes=300)
    two = prepare([lines], tmp_path / "two", part_bytes=300, workers=2)
    assert one["digest"] == two["digest"]
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


@pytest.mark.slow
def test_a_killed_worker_is_an_error(lines, tmp_path, monkeypatch):
    """Its input is a pipe that nobody writes: it reads until it is killed."""
    os.mkfifo(tmp_path / "hangs.txt")
    ended = []

    real = module.wait

    def killing(running, **how):
        for process in list(pools[0]._processes.values()):
            os.kill(process.pid, signal.SIGKILL)
            ended.append(process.pid)
        return real(running, **how)

    pools, pool = [], module.ProcessPoolExecutor
    monkeypatch.setattr(module, "ProcessPoolExecutor", lambda *a, **k: pools.append(pool(*a, **k)) or pools[0])
    monkeypatch.setattr(module, "wait", killing)
    with pytest.raises(RuntimeError, match="a worker has died .* the same command goes on with what is done"):
        prepare([tmp_path / "hangs.txt", lines], tmp_path / "c", workers=2)
    assert ended


@pytest.mark.slow
def test_a_killed_run_takes_its_workers_along_and_goes_on(lines, tmp_path):
    """They waited for work for ever, each with its memory."""
    arguments = ["prepare", str(lines), "--output", str(tmp_path / "c"), "--eod", "256", "--workers", "2"]
    arguments += ["--part-bytes", "20"]
    run = subprocess.Popen([sys.executable, "-m", "fmegatron.data", *arguments])
    while not list(tmp_path.glob("c.parts/0*.json")) or not (workers := psutil.Process(run.pid).children()):
        assert run.poll() is None
        time.sleep(0.005)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert psutil.wait_procs(workers, timeout=30)[1] == [] and (tmp_path / "c.parts").exists()
    assert main(arguments) == 0
    assert documents(IndexedTokens(tmp_path / "c")) == wanted(256)


def test_commands(lines, tmp_path, capsys):
    out = str(tmp_path / "c")
    assert main(["prepare", str(lines), "--output", out, "--eod", "256", "--pack", "64", "--split", "9,1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 62 and facts["pack"]["rows"] == len(load_packing(out + ".pack-64"))
    assert main(["merge", str(tmp_path / "twice"), out, out]) == 0
    assert main(["inspect", str(tmp_path / "twice"), "--documents", "1"]) == 0
    shown = capsys.readouterr().out
    assert "124 documents" in shown and "document 0: 9 tokens: 84, 101" in shown
    assert main(["inspect", str(tmp_path / "none")]) == 2 and "none.idx" in capsys.readouterr().err


def bad(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl: got a line at byte 14 that is no JSON"),
        ("a.jsonl", b'{"txt": "a"}\n', "a.jsonl, byte 0: got the fields txt, wanted a text in 'text'; .* --key"),
        ("a.jsonl", b"[1]\n", "a.jsonl, byte 0: got a line that is a list, wanted one object a line"),
        ("a.jsonl", b'{"text": "\xff"}\n', "no UTF-8 at byte 10"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "a damaged gzip file"),
        ("a.csv", b"a", "got a file of an unknown kind"),
    ],
    ids=["no JSON", "no text", "no object", "no UTF-8", "damaged", "unknown"],
)
def test_bad_inputs_name_file_and_place(tmp_path, capsys, name, content, message):
    out = str(tmp_path / "c")
    assert main(["prepare", bad(tmp_path, name, content), "--output", out]) == 2
    assert re.search(message, capsys.readouterr().err) and not os.path.exists(out + ".idx")


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow"), ("a", "datasets")])
def test_optional_packages_are_named(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "state.json").write_text("{}")
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(ImportError, match=f"pip install {package}"):
        prepare([tmp_path / name], tmp_path / "c")
    assert list(texts_of(Part(str(tmp_path / "a.jsonl.zst"), "lines", 0, 0), "text")) == []


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """The extra `data`, which `make test-all` installs."""
    for name in ("zstandard", "pyarrow", "datasets"):
        pytest.importorskip(name, reason="the extra `data` is not installed; `make test-all` installs it")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow  # three seconds of imports
@pytest.mark.filterwarnings("ignore")  # of these packages about one another
def test_kinds_of_the_extra(packages, lines, tmp_path, capsys, monkeypatch):
    """zstd of several frames, Parquet of several row groups, a folder of datasets: the same corpus."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet
    import zstandard

    content, pack = lines.read_bytes(), zstandard.ZstdCompressor()
    frames = [pack.compress(content[:1001]), pack.compress(b""), pack.compress(content[1001:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    table = pa.table({"n": range(62), "text": pa.array(TEXTS, pa.large_string())})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    rows = datasets.Dataset.from_dict({"n": range(62), "text": TEXTS})
    rows.save_to_disk(str(tmp_path / "a"))
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path / "splits"))
    for name, parts in (("a.jsonl.zst", 1), ("a.parquet", 3), ("a", 1), ("splits/train", 1)):
        assert len(parts_of(tmp_path / name, 300)) == parts
        prepare([tmp_path / name], tmp_path / "c", eod=256, fresh=True)
        assert documents(IndexedTokens(tmp_path / "c")) == wanted(256), name
    monkeypatch.setattr(texts, "_ROWS", 7)
    assert list(texts_of(Part(str(tmp_path / "a"), "dataset", 3, 29), "text")) == TEXTS[3:29]

    (tmp_path / "cut.jsonl.zst").write_bytes(b"".join(frames)[:-9])
    (tmp_path / "bad.jsonl.zst").write_bytes(frames[0] + b"garbage!")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + b"\0" * 99)
    pa.parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "none.parquet")
    for name, message in (
        ("cut.jsonl.zst", r"cut.jsonl.zst: got a zstd file that was cut off|byte \d+ that is no JSON"),
        ("bad.jsonl.zst", "a damaged zstd file"),
        ("bad.parquet", "bad.parquet: got a damaged Parquet file"),
        ("none.parquet", "none.parquet, row group 0: got NoneType in 'text', .* wanted texts"),
        ("splits", "got a folder of several splits, wanted one of them; name .*splits/train"),
    ):
        assert main(["prepare", str(tmp_path / name), "--output", str(tmp_path / "d"), "--fresh"]) == 2
        assert re.search(message, capsys.readouterr().err), name
    assert main(["prepare", str(tmp_path / "a"), "--output", str(tmp_path / "d"), "--key", "txt", "--fresh"]) == 2
    assert "got the fields n, text, wanted a text in 'txt'" in capsys.readouterr().err


def test_many_texts_at_once_are_each_of_them(lines, tmp_path, monkeypatch):
    """The end of a document behind each, also of one that has no token; blocks of lines of any size."""
    monkeypatch.setattr(module, "_TOGETHER", 100)
    monkeypatch.setattr(texts, "_BLOCK", 64)
    prepare([lines], tmp_path / "c", eod=256, part_bytes=1000)
    assert documents(IndexedTokens(tmp_path / "c")) == wanted(256)
    prepare([lines], tmp_path / "c")
    assert documents(IndexedTokens(tmp_path / "c")) == wanted()


def test_odd_lines_are_read_or_named(tmp_path):
    """A byte order mark is no text; what cannot be read is named with its byte."""
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "\\ud83d\\ude00"}\r\n')
    assert [t for part in parts_of(path, 9) for t in texts_of(part, "text")] == ["a", "\U0001f600"]
    (tmp_path / "odd.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert list(texts_of(Part(str(tmp_path / "odd.txt"), "text", 0, 1), "text")) == ["abc"]
    deep, digits = b"[" * 100_000 + b"]" * 100_000, b"9" * 10_000
    for line, words in [
        (b'{"text": "x\\ud83dy"}', "half of a surrogate pair"),
        (b'{"text": "x", "y": ' + deep + b"}", "no JSON"),
        (b'{"text": "x", "y": ' + digits + b"}", "no JSON"),
        (b'[{"text": "x"}]', "is a list, wanted one object a line"),
    ]:
        path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
        with pytest.raises(ValueError, match=words) as info:
            prepare([path], tmp_path / "c", fresh=True)
        assert "byte 14" in str(info.value) and "odd.jsonl" in str(info.value)


@pytest.mark.parametrize("wrong", [{"split": "a,b"}, {"split": "nan,1"}, {"split": "1,inf"}, {"eod": 1 << 31}])
def test_wrong_arguments_are_found_before_the_work(lines, tmp_path, wrong):
    with pytest.raises(ValueError, match="wanted"):
        prepare([lines], tmp_path / "c", **wrong)
    assert not (tmp_path / "c.parts").exists()


def test_the_shortest_document(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "ab"}\n')
    assert prepare([path], tmp_path / "c")["document_tokens"]["min"] == 2


@pytest.mark.parametrize("text", ["", "\n\n", '{"text": ""}\n'])
def test_inputs_without_any_text_are_refused(tmp_path, text):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"in.jsonl: got no text, wanted some; look at the inputs and at key='text'"):
        prepare([path], tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
