"""experiments/finetune.py: folders of random tiny models are trained on any mesh, and transformers loads the result."""

import io
import json

import pytest
import torch

from experiments import finetune
from fmegatron import loop, step
from fmegatron.data.__main__ import main as data_command
from fmegatron.layout import Mesh
from fmegatron.loop.config import UsageError
from fmegatron.model.__main__ import main as model_command
from tests.experiments.given import made
from tests.model.families.tiny_hf import config_of, model_of

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
TINY = {"seq_len": 16, "batch_size": 8, "steps": 6, "lr": 1e-2, "backend": "eager"}


def folder(name, path):
    """A folder of a model that has all bytes."""
    theirs = model_of(name, vocab_size=256)
    theirs.save_pretrained(path)
    return theirs


def finetuned(rank, config):
    """On a real rank."""
    return finetune.experiment(config).metrics


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3.1", "gemma2", "gpt2"])
def test_a_folder_is_trained_and_transformers_loads_it(name, tmp_path):
    theirs = folder(name, tmp_path / "model")
    places = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out"), "run": str(tmp_path / "run")}
    finetune.experiment(made(finetune.Config, **places, **TINY))
    first, last = (
        r["loss"] for r in loop.read_metrics(tmp_path / "run" / "metrics.jsonl") if r["step"] in (1, 6) and "loss" in r
    )
    tokens = torch.tensor(finetune.token_ids(made(finetune.Config, **places), 256)[:256]).long().view(16, 16)
    tuned = type(theirs).from_pretrained(tmp_path / "out").eval()
    before, after = (m(tokens, labels=tokens).loss.item() for m in (theirs, tuned))
    assert last < first - 0.3 and after < before - 0.3
    assert {p.dtype for p in tuned.parameters()} == {torch.float32}
    assert config_of(name)[1].model_type == tuned.config.model_type


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, meshes",
    [("llama3.1", (Mesh(tp=2), Mesh(fsdp=2))), ("mixtral", (Mesh(ep=2),)), ("gemma2", (Mesh(cp=2),))],
    ids=["tp, fsdp", "ep", "cp"],
)
def test_on_two_ranks_it_writes_the_folder_of_one(tmp_path, ranks, kind, meshes):
    folder(kind, tmp_path / "model")
    tuned = []
    for mesh in (Mesh(), *meshes):
        places = {"out": str(tmp_path / f"{mesh}_out"), "run": str(tmp_path / f"{mesh}_run")}
        config = made(
            finetune.Config, model=str(tmp_path / "model"), mesh=mesh, **places, **{**TINY, "steps": 2, "lr": 1e-3}
        )
        if mesh.size == 1:
            finetune.experiment(config)
        else:
            ranks.run(finetuned, config, ranks=2)
        tuned.append(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{mesh}_out").state_dict())
    for path, one in tuned[0].items():
        for other in tuned[1:]:  # Adam's first steps have the sign of the gradient, also of one that is rounding only
            assert ((other[path] - one).abs() > 1e-5).double().mean() < 0.01, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, mesh",
    [("mixtral", Mesh(fsdp=2, ep=2, tp=2)), ("qwen3-moe", Mesh(ep=2, cp=2)), ("deepseek-v3", Mesh(fsdp=2, ep=2))],
    ids=str,
)
@pytest.mark.long
def test_steps_of_experts_are_proven(tmp_path, kind, mesh):
    folder(kind, tmp_path / "model")
    report = step.check(*finetune.describe(made(finetune.Config, model=str(tmp_path / "model"), mesh=mesh, **TINY)))
    assert report.ok and not report.unproven, str(report)


@pytest.mark.slow
@pytest.mark.long
def test_a_corpus_is_trained_on_and_the_result_talks(tmp_path):
    theirs = folder("llama3.1", tmp_path / "model")
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.train_from_iterator(["To be or not to be"] * 9, tokenizers.trainers.BpeTrainer(vocab_size=theirs.vocab_size))
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": "To be or not to be " * n}) for n in range(40)))
    prefix = str(tmp_path / "corpus")
    arguments = ["--output", prefix, "--tokenizer", str(tmp_path / "model")]
    assert data_command(["prepare", str(tmp_path / "lines.jsonl"), *arguments]) == 0
    places = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out"), "run": str(tmp_path / "run")}
    config = made(finetune.Config, **places, text=f"{prefix}.bin", **{**TINY, "steps": 2})
    finetune.experiment(config)
    out = io.StringIO()
    assert model_command(["chat", str(tmp_path / "run"), "--prompt", "To be", "--tokens", "5"], out=out) == 0
    assert len(out.getvalue()) > 5  # and no error: most ids of the model are none of the tokenizer
    (tmp_path / "model" / "tokenizer.json").unlink()  # now its tokens are bytes
    with pytest.raises(UsageError, match="text: .*got a corpus of another tokenizer, wanted the model's"):
        finetune.experiment(made(config, run=str(tmp_path / "other"), out=str(tmp_path / "other_out")))
    with pytest.raises(UsageError, match="out: .*got a path that exists already"):  # before it trains
        finetune.experiment(made(config, run=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_a_text_that_the_vocabulary_does_not_have(tmp_path):
    model_of("llama2").save_pretrained(tmp_path / "model")
    config = made(
        finetune.Config, model=str(tmp_path / "model"), run=str(tmp_path / "run"), out=str(tmp_path / "o"), **TINY
    )
    with pytest.raises(UsageError, match="text: got token 122, wanted at most 69"):
        finetune.experiment(config)
