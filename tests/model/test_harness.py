"""lm-evaluation-harness: its requests give our scores, and a local task runs to its end where the package is there."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from fmegatron import data, model
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.harness import _Answers
from tests.model.test_reference import leaves_that_differ, tiny

DECODER = tiny(vocab_size=256, max_seq=24)
TOKENIZER = data.ByteTokenizer()


@pytest.fixture(scope="module")
def reader():
    params = leaves_that_differ(model.init(DECODER, Mesh(), key=5))
    return model.inference(params, DECODER, model.layouts(DECODER, Mesh()), Axes(Mesh()))


def total(reader, prompt, behind):
    return model.score(reader, [list(prompt)], [list(behind)])[0].total


def test_pairs_are_scored_behind_their_contexts(reader):
    answers = _Answers(reader, TOKENIZER, 10, 2, 8)
    asked = [("to be", " or"), ("to be ", "or"), ("", "not"), ("x" * 40, "yz"), ("a", "b" * 40)]
    got = answers.loglikelihoods(asked)
    assert got[0] == got[1], "spaces at the end of a context belong to the continuation"
    assert math.isclose(got[0][0], total(reader, b"to be", b" or"))
    assert math.isclose(got[2][0], total(reader, b"\n", b"not"))
    assert math.isclose(got[3][0], total(reader, b"x" * 23, b"yz"))
    assert math.isclose(got[4][0], total(reader, b"a", b"b" * 24))
    assert answers.loglikelihoods([]) == []


def test_a_text_counts_each_of_its_tokens_once(reader):
    answers, text = _Answers(reader, TOKENIZER, 10, 2, 8), "to be or not to be, that is the question"
    ids = b"\n" + text.encode()
    wanted = total(reader, ids[:1], ids[1:25]) + total(reader, ids[24:25], ids[25:])
    assert len(ids) == 41 and math.isclose(answers.rolling(text), wanted)
    assert answers.rolling("") == 0.0


def test_texts_end_at_their_stops_whatever_group_they_are_in(reader):
    answers = _Answers(reader, TOKENIZER, 10, 2, 8)
    contexts = ["a", "to be or", "x" * 40]
    free = answers.texts([(context, {}) for context in contexts])
    for context, text in zip(contexts, free, strict=True):
        prompt = torch.tensor([list(context.encode()[-16:])])
        assert text == TOKENIZER.decode(model.generate(reader, prompt, 8, temperature=0)[0])
    stop = free[1][2:4]
    long = {"until": [stop], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    got = answers.texts([(contexts[0], long), (contexts[1], {"until": stop}), (contexts[1], long)])
    assert got[1] == got[2] == free[1].partition(stop)[0]


def test_the_adapter_answers_requests(reader):
    pytest.importorskip("lm_eval")
    adapter = model.harness(reader, TOKENIZER)
    [(score, greedy)] = adapter.loglikelihood([SimpleNamespace(args=("to be", " or"))])
    assert math.isclose(score, total(reader, b"to be", b" or")) and not greedy


def test_a_local_task(reader, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    from lm_eval.evaluator import simple_evaluate

    rows = [{"q": f"question {i}:", "right": i % 2} for i in range(6)]
    (tmp_path / "local.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "local.jsonl")}, "cache_dir": str(tmp_path)},
        "doc_to_text": "{{q}}", "doc_to_choice": ["yes", "no"], "doc_to_target": "{{right}}",
    }  # fmt: skip
    found = simple_evaluate(model=model.harness(reader, TOKENIZER), tasks=[task], bootstrap_iters=0)
    best = [max((0, 1), key=lambda c, q=row["q"]: total(reader, q.encode(), (b" yes", b" no")[c])) for row in rows]
    wanted = sum(a == row["right"] for a, row in zip(best, rows, strict=True)) / len(rows)
    assert found["results"]["local"]["acc,none"] == pytest.approx(wanted), lm_eval.__version__
