"""docs/adapters.md: its lines are run, as somebody would who knows the public names only."""

import functools

import pytest
import torch

from fmegatron import checkpoint, model, plan, step, tree
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from tests.definition import loss_of
from tests.house import ROOT
from tests.model.test_reference import tiny

DECODER = tiny(max_seq=12, vocab_size=50)


@functools.cache
def page():
    """The names that the block of the page defines."""
    text = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
    code = text.partition("<!-- adapters: run by")[2].partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(compile(code, "docs/adapters.md", "exec"), names)
    return names


def batch_of(i):
    ids = torch.randint(0, 50, (8, 1), generator=torch.Generator().manual_seed(i)) + torch.arange(13)  # it counts
    return {"tokens": ids[:, :-1] % 50, "labels": ids[:, 1:] % 50}


@pytest.mark.slow
def test_trained_saved_written_and_merged(tmp_path):
    names, base = page(), init(DECODER, Mesh(), key=5)
    checkpoint.save(tmp_path / "base", base)
    batches = [batch_of(i) for i in range(12)]
    params, losses = names["train"](DECODER, tmp_path / "base", tmp_path / "lora", batches, backend="eager")
    assert losses[-1] < losses[0] - 0.01
    assert all(map(torch.equal, tree.leaves(params["base"]), tree.leaves(base)))
    saved = checkpoint.restore(tmp_path / "lora", names["describe"](DECODER, Mesh()).state.params["lora"])
    assert all(map(torch.equal, tree.leaves(saved), tree.leaves(params["lora"])))
    merged = names["merge"](params)
    loss, _ = model.loss(merged, batches[0], DECODER)
    adapted, _ = model.loss(model.adapted(params["base"], params["lora"]), batches[0], DECODER)
    torch.testing.assert_close(loss_of(loss), loss_of(adapted), rtol=1e-12, atol=0)
    prompts = [batches[0]["tokens"][0, :4], batches[0]["tokens"][1, :2]]
    nothing = tree.map(torch.zeros_like, params["lora"])
    tree.place(nothing, params["lora"])
    of_merged = {"base": merged, "lora": nothing}
    texts = [names["write"](DECODER, each, prompts, 5) for each in (params, of_merged)]
    assert torch.equal(*texts)


@pytest.mark.slow
def test_it_is_proven_and_planned():
    described = page()["describe"](DECODER, Mesh(fsdp=2, tp=2))
    report = step.check(*described)
    assert report.ok and not report.unproven, report
    assert any("with adapters plan.exact counts them" in said for said in plan.quick(described).unknown)
