"""lm-evaluation-harness: its requests give our scores, and a local task runs to its end where the package is there."""

import json
import math
import socket
from types import SimpleNamespace

import pytest
import torch

from fmegatron import data, model
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.lm_harness import _Answers
from tests.model.test_reference import leaves_that_differ, tiny

DECODER = tiny(vocab_size=256, max_seq=24)
TOKENIZER = data.ByteTokenizer()
QUESTIONS = [f"question {i}:" for i in range(6)]
WHY = "the extra `eval` is not installed; `make test-all` installs it"


@pytest.fixture(scope="module")
def reader():
    params = leaves_that_differ(init(DECODER, Mesh(), key=5))
    return model.inference(params, DECODER, Axes(Mesh()))


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


TASKS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/local.jsonl}}, cache_dir: {folder}}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["yes", "no"]
doc_to_target: right
metric_list: [{metric: acc}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list: [{metric: bits_per_byte}]
"""
UNTIL = """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.slow  # the imports of lm_eval and its packages
@pytest.mark.filterwarnings("ignore")  # of these packages about one another
def test_local_tasks(reader, tmp_path, monkeypatch):
    """YAML files and a JSONL file, no network: what the harness counts is `model.score`, `perplexity`, `generate`."""
    lm_eval, datasets = (pytest.importorskip(name, reason=WHY) for name in ("lm_eval", "datasets"))
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    def no_network(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    new = {q: model.generate(reader, torch.tensor([list(q.encode())]), 4, temperature=0)[0] for q in QUESTIONS}
    texts = {q: TOKENIZER.decode(ids).partition("\n")[0] for q, ids in new.items()}
    rows = [{"q": q, "right": i % 2, "answer": texts[q] if i < 4 else "?"} for i, q in enumerate(QUESTIONS)]
    (tmp_path / "local.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, what in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        (tmp_path / f"{name}.yaml").write_text(TASKS.format(name=name, folder=tmp_path) + what)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = {"task_manager": manager, "bootstrap_iters": 0}
    got = simple_evaluate(model=model.harness(reader, TOKENIZER), tasks=["choice", "rolling", "until"], **options)

    best = [max((0, 1), key=lambda c, q=q: total(reader, q.encode(), (b" yes", b" no")[c])) for q in QUESTIONS]
    right = sum(a == row["right"] for a, row in zip(best, rows, strict=True)) / len(rows)
    assert got["results"]["choice"]["acc,none"] == pytest.approx(right), lm_eval.__version__
    logs = [total(reader, b"\0", q.encode()) for q in QUESTIONS]
    bits = -sum(logs) / sum(len(q.encode()) for q in QUESTIONS) / math.log(2)
    assert got["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    assert got["results"]["until"]["exact_match,none"] == pytest.approx(4 / 6)
