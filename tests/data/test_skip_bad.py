"""Corpora of the web: documents that cannot be read are left out where that is asked for, with counts and places."""

import gzip
import json

import numpy as np
import pytest

from fmegatron.data import ByteTokenizer, CharTokenizer, IndexedTokens
from fmegatron.data.__main__ import main
from fmegatron.data.prepare import prepare
from fmegatron.data.samples import Sample, require_same_text

GOOD = [b'{"text": "good"}', '{"text": "naïve"}'.encode(), b'{"text": "also good"}']
BAD = {
    b'{"text": "b\xffd"}': "no UTF-8",
    b'{"text": null}': "no text",
    b'{"text": 5}': "no text",
    b'{"other": "x"}': "no text",
    b'["text"]': "no text",
    b'{"text": "one", "n": {"text": 1}, "text": "two"}': "no JSON",
    b'{"text": "half \\ud83d"}': "half of a surrogate pair",
    b'{"text": "cut': "no JSON",
    b'{"text": "' + b"\xc3": "no UTF-8",
}


def texts(prefix):
    tokens = IndexedTokens(prefix)
    return [ByteTokenizer().decode(tokens[slice(*tokens.document(i))]) for i in range(tokens.documents)]


def mixed():
    """(lines, good and bad in turns; {byte: why} of the bad ones)."""
    lines, places, at = [], {}, 0
    for number, (line, why) in enumerate(BAD.items()):
        for one in (GOOD[number % 3], line):
            if one is line:
                places[at] = why
            lines.append(one)
            at += len(one) + 1
    return lines, places


@pytest.mark.parametrize("part_bytes", [1 << 20, 40])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_bad_lines_are_left_out_with_their_places(tmp_path, kind, part_bytes):
    lines, places = mixed()
    path, data = tmp_path / f"a.{kind}", b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    with pytest.raises(ValueError, match=r"a.jsonl.*UTF-8.*or leave such documents out: --skip-bad"):
        prepare([path], tmp_path / "c", part_bytes=part_bytes)
    facts = prepare([path], tmp_path / "d", part_bytes=part_bytes, skip_bad=True)
    assert texts(tmp_path / "d") == [json.loads(GOOD[i % 3])["text"] for i in range(len(BAD))]
    why = {}
    for one in places.values():
        why[one] = why.get(one, 0) + 1
    assert facts["skipped"]["documents"] == len(BAD) and facts["skipped"]["why"] == why
    listed = [json.loads(line) for line in (tmp_path / "d.skipped.jsonl").read_text().splitlines()]
    assert [one["at"] for one in listed] == list(places) and listed == facts["skipped"]["first"]
    assert all(one["path"] == str(path) and "wanted" in one["why"] for one in listed)


def test_by_the_command(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "b\xffd"}\n{"text": "also good"}\n')
    command = ["prepare", str(path), "--output", str(tmp_path / "c")]
    assert main(command) == 2 and "at byte 28, wanted UTF-8; or leave such documents out: --skip-bad" in (
        capsys.readouterr().err
    )
    assert main([*command, "--skip-bad"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"]["documents"] == 1
    assert texts(tmp_path / "c") == ["good", "also good"]
    assert main([*command[:2], "--output", str(tmp_path / "d"), "--skip-bad", "--key", "txt"]) == 2
    assert "got no document that can be read" in capsys.readouterr().err  # a wrong name of the field is not bad data


def test_a_run_that_goes_on_with_it_and_without(tmp_path, monkeypatch):
    """Parts that were made before the bad one stay; those that left something out are none without the flag."""
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*GOOD, *BAD]))
    made, call = [], {"inputs": [tmp_path / "a.jsonl"], "prefix": tmp_path / "c", "part_bytes": 20}
    with pytest.raises(ValueError, match="--skip-bad"):
        prepare(**call, progress=lambda done, parts, tokens: made.append(done))
    monkeypatch.setattr("fmegatron.data.prepare.link_indexed", None)
    monkeypatch.setattr("fmegatron.data.prepare.merge_indexed", None)
    with pytest.raises(TypeError):  # all parts are made, and not joined
        prepare(**call, skip_bad=True, progress=lambda done, parts, tokens: made.append(done))
    assert made[0] == 1 and made == sorted(set(made))  # none was made twice
    monkeypatch.undo()
    with pytest.raises(ValueError, match="--skip-bad"):
        prepare(**call)
    assert prepare(**call, skip_bad=True)["skipped"]["documents"] == len(BAD)


def test_nothing_bad_leaves_no_list(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(GOOD))
    (tmp_path / "b.txt").write_bytes(b"text")
    facts = prepare([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "c", skip_bad=True)
    assert facts["skipped"] == {"documents": 0, "why": {}, "first": []}
    assert not (tmp_path / "c.skipped.jsonl").exists() and facts["documents"] == 4


def test_a_text_file_and_rows(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.jsonl").write_bytes(GOOD[0])
    with pytest.raises(ValueError, match="a.txt: got no document that can be read"):
        prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "c", skip_bad=True)
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = arrow.table({"text": ["good", None, "also good", None]})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=3)
    facts = prepare([tmp_path / "d.parquet"], tmp_path / "e", skip_bad=True)
    assert [one["at"] for one in facts["skipped"]["first"]] == [1, 3] and texts(tmp_path / "e") == ["good", "also good"]


# ---- whether texts come back from their ids
class Cuts(CharTokenizer):
    """Cuts each text to 4 ids, or fills it up to 4, as a library does that was told to."""

    def encode_many(self, texts):
        rows = [self.encode(text[:4].ljust(4, "_")) for text in texts]
        return np.concatenate(rows), np.array([4] * len(texts))


def sample_of(tokenizer, texts):
    sample = Sample()
    sample.take(tokenizer, texts, *tokenizer.encode_many(texts))
    return sample.counts


VOCAB = "_abcdefghijklmnopqrstuvwxyz "


@pytest.mark.parametrize("texts", [["the quick brown fox jumps"], ["a", "b", "c"]])
def test_ids_of_other_texts_are_refused(texts):
    with pytest.raises(ValueError, match="that decode to other ones: .* lost, .* added, wanted a tokenizer that knows"):
        require_same_text("c", [sample_of(Cuts(VOCAB), texts)])
    require_same_text("c", [sample_of(CharTokenizer(VOCAB), texts)])


def test_ids_of_nearly_the_same_texts():
    """Case, accents and spaces may differ; a few characters that a tokenizer does not know are warned of."""

    class Lossy(ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).lower().replace("é", "e").replace("#", "").replace(" ", "  ")

    require_same_text("c", [sample_of(Lossy(), ["Le café  EST ouvert"])])
    with pytest.warns(RuntimeWarning, match="4 are lost, 0 added"):
        require_same_text("c", [sample_of(Lossy(), ["café ####", "the second document of this part"])])
    require_same_text("c", [])


def test_prepare_looks_at_a_sample(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"words of line {i}"}) + "\n" for i in range(99)))
    (tmp_path / "chars.json").write_text(json.dumps({"kind": "char", "vocab": VOCAB + "0123456789"}))
    decoded = []
    monkeypatch.setattr(CharTokenizer, "decode", lambda self, ids: decoded.append(len(ids)) or "")
    with pytest.raises(ValueError, match="that decode to other ones"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "c", str(tmp_path / "chars.json"))
    assert len(decoded) == 4 and not (tmp_path / "c.json").exists()
