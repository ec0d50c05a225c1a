"""Multi-token prediction: against plain torch and transformers, on simulated ranks, and its weights there and back."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fmegatron import checkpoint, interop, model, step, tree
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.counts import flops_per_token, parameters
from fmegatron.model.forward import block, hidden
from fmegatron.model.mtp import ahead as ahead_of_model
from fmegatron.testing import assert_parity
from tests.definition import loss_of
from tests.model.families.test_families_sharded import assert_proven
from tests.model.families.tiny_hf import MLA, MOE, SMALL, YARN
from tests.model.test_reference import leaves_that_differ, make_batch, tiny
from tests.model.test_sharded import batch_layouts, make_step, raw_layouts
from tests.pairs import few

ONE = Mesh()


def further(depths=2, weight=0.3, **changes):
    """A Llama of two layers that predicts more tokens."""
    of = tiny(**{"heads": 4, "kv_heads": 2} | changes)
    return dataclasses.replace(of, mtp=model.MTP(of.blocks[0], depths, weight, of.norm))


# ---- against plain torch ---------------------------------------------------------------------------------------------
def plain_losses(params, batch, of):
    """[main, depth 1, depth 2, ...]: sums over rows, documents and depths written out."""
    axes = Axes(ONE)
    x, w, at, _ = hidden(params, batch, of, axes)

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + of.norm.eps) * weight

    h, table = norm(x, w["final_norm"]), params["embed"]["table"]
    labels, mask = batch["labels"], batch.get("mask", torch.ones_like(batch["labels"], dtype=torch.float64))
    documents = batch.get("documents", torch.zeros_like(labels))
    rows, length = labels.shape

    def mean(h, n):
        nll = F.cross_entropy(
            (h @ w["head"]["w"])[..., : of.vocab_size].flatten(0, 1), (labels).flatten(), reduction="none"
        )
        if n == 0:
            return (nll.view(rows, length) * mask).sum() / mask.sum()
        total, count = 0.0, 0.0
        logp = (h @ w["head"]["w"])[..., : of.vocab_size].log_softmax(-1)
        for b in range(rows):
            for t in range(length - n):
                if documents[b, t] == documents[b, t + n]:
                    total = total - logp[b, t, labels[b, t + n]] * mask[b, t + n]
                    count = count + mask[b, t + n]
        return total / count

    losses = [mean(h, 0)]
    for n in range(1, of.mtp.depths + 1):
        own = tree.map(lambda x, n=n: x[n - 1], params["mtp"])
        ids = torch.zeros_like(labels)
        ids[:, : length - n + 1] = labels[:, n - 1 :]
        both = torch.cat((norm(table[ids], own["embed_norm"]), norm(h, own["hidden_norm"])), -1)
        angles = of.at(at.positions, at.documents, (of.mtp.block,))[0]
        y = block(both @ own["proj"], own, angles, parts=of.mtp.block)
        h = norm(y, own["out_norm"])
        losses.append(mean(h, n))
    return losses


@pytest.mark.parametrize("kind", ["plain", "mask", "packed"])
def test_loss_and_gradients_are_those_of_plain_torch(kind):
    of = further(loss_chunks=3 if kind == "mask" else 1)
    params = tree.map(lambda x: x.requires_grad_(), leaves_that_differ(init(of, ONE, key=3)))
    batch = make_batch(of, mask=kind == "mask")
    if kind == "packed":
        batch["documents"] = (torch.arange(12) >= torch.tensor([[5], [11], [12]])).long()
    parts, _ = model.loss(params, batch, of, Axes(ONE))
    loss, metrics = loss_of(parts), step.means(parts, Axes(ONE))
    main, *depths = plain_losses(params, batch, of)
    want = main + 0.3 * (depths[0] + depths[1]) / 2
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    got = torch.stack([metrics["mtp_1"], metrics["mtp_2"]])
    torch.testing.assert_close(got, torch.stack(depths).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["lm"], main.detach(), rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x, tree.leaves(params)) for x in (loss, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_logits_and_generation_do_without():
    of = further()
    params, layouts, axes = init(of, ONE, 3), model.layouts(of, ONE), Axes(ONE)
    without = dataclasses.replace(of, mtp=None)
    rest, of_rest = ({k: v for k, v in x.items() if k != "mtp"} for x in (params, layouts))
    tokens = make_batch(of)["tokens"]
    assert torch.equal(
        *(model.logits(p, tokens, d, axes) for p, d, y in ((params, of, layouts), (rest, without, of_rest)))
    )
    assert model.generate(model.inference(params, of, axes), tokens[:, :5], 3).shape == (3, 3)
    counts = parameters(of)
    assert counts["total"] == counts["mtp"] + parameters(without)["total"]
    assert flops_per_token(of, training=False) == flops_per_token(without, training=False)


def test_ahead_ends_with_rows_documents_and_masks():
    labels, documents = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 0, 1, 1]])
    batch = {"tokens": labels - 1, "labels": labels, "documents": documents, "mask": torch.tensor([[1, 0, 1, 1, 1]])}
    found = ahead_of_model(batch, 2)
    assert found["ahead_tokens"][0].T.tolist() == [[1, 2, 3, 4, 5], [2, 3, 4, 5, 0]]
    assert found["ahead"][0].T.tolist() == [[2, 3, 4, 5, -100], [3, 4, 5, -100, -100]]
    assert found["ahead_mask"][0].T.tolist() == [[0, 1, 0, 1, 0], [1, 0, 0, 0, 0]]


def test_a_prompt_without_labels_is_read_as_it_is():
    """Labels of -100 and a mask of 0 are one thing: a depth reads the tokens behind, learned from or not."""
    of = further(layers=1)
    params, batch = leaves_that_differ(init(of, ONE, key=3)), make_batch(of)
    batch["labels"] = torch.cat((batch["tokens"][:, 1:], batch["labels"][:, -1:]), 1)  # the text goes on
    learned = torch.arange(batch["tokens"].shape[1]) >= torch.tensor([[4], [9], [0]])
    masked, no_labels = {**batch, "mask": learned}, {**batch, "labels": torch.where(learned, batch["labels"], -100)}
    loader = {**no_labels, **{k: v for k, v in ahead_of_model(no_labels, 2).items() if k in ("ahead", "ahead_mask")}}

    def found(batch):
        parts = step.means(model.loss(params, batch, of, Axes(ONE))[0], Axes(ONE))
        return torch.stack([parts["lm"], parts["mtp_1"], parts["mtp_2"]])

    want = found(masked)
    assert not want.isnan().any()
    for one in (no_labels, loader):
        torch.testing.assert_close(found(one), want, rtol=1e-12, atol=0)


# ---- on a mesh -------------------------------------------------------------------------------------------------------
MESHED = {
    "tp": (Mesh(tp=2), {}),
    "fsdp, tp, sequence parallel, chunks": (Mesh(fsdp=2, tp=2), {"sequence_parallel": True, "loss_chunks": 2}),
    "cp": (Mesh(cp=2), {}),
    "dp, cp, tp, tied": (Mesh(dp=2, cp=2, tp=2), {"tied": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", few(1, [(name,) for name in MESHED], MESHED))
def test_on_a_mesh(name):
    """Rows have other numbers of tokens that count: the divisor of each depth is the global one."""
    mesh, changes = MESHED[name]
    of = further(layers=1, **changes)
    params = leaves_that_differ(init(of, ONE, key=3))
    batch = ahead_of_model(make_batch(of, batch_size=4, mask=True), 2)
    assert_parity(
        make_step(of, "inputs"), mesh, params, batch,
        layouts=(model.layouts(of, mesh), batch_layouts(batch, mesh)), out_layouts=raw_layouts(of, mesh),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", few(1, [(False,), (True,)], ["", "sequence parallel"]))
def test_every_output_is_proven(sequence_parallel):
    assert_proven(further(layers=1, sequence_parallel=sequence_parallel), Mesh(fsdp=2, tp=2))


def test_what_a_split_sequence_needs():
    of, mesh = further(), Mesh(cp=2)
    batch = make_batch(of)
    with pytest.raises(
        ValueError, match=r"batch: got no 'ahead' on the mesh cp2, .*; give model.ahead\(batch, 2\) of whole"
    ):
        model.loss(init(of, mesh, 0), batch, of, Axes(mesh))
    of_row = {k: v for k, v in ahead_of_model(batch, 2).items() if k != "ahead_tokens"}
    with pytest.raises(ValueError, match=r"batch: got no 'ahead_tokens' on the mesh cp2"):
        model.loss(init(of, mesh, 0), of_row, of, Axes(mesh))
    with pytest.raises(ValueError, match=r"batch\['ahead'\]: got shape \(3, 12, 1\), wanted \(3, 12, 2\)"):
        model.loss(init(of, ONE, 0), ahead_of_model(batch, 1), of, Axes(ONE))


# ---- DeepSeek V3 -----------------------------------------------------------------------------------------------------
def released_names(mtp, layers):
    """The weights of transformers' `MtpModel` as the released folders name them."""
    out = {}
    for name, x in mtp.layers.state_dict().items():
        k, rest = name.split(".", 1)
        at = f"model.layers.{layers + int(k)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if rest.endswith("experts.gate_up_proj"):
            for e, one in enumerate(x):
                for kind, part in zip(("gate", "up"), one.chunk(2), strict=True):
                    out[f"{at}mlp.experts.{e}.{kind}_proj.weight"] = part
        elif rest.endswith("experts.down_proj"):
            out |= {f"{at}mlp.experts.{e}.down_proj.weight": one for e, one in enumerate(x)}
        else:
            out[at + rest] = x
    for k in range(len(mtp.layers)):
        out[f"model.layers.{layers + k}.embed_tokens.weight"] = mtp.embed_tokens.weight
        out[f"model.layers.{layers + k}.shared_head.head.weight"] = mtp.shared_head.weight
    return {name: x.detach().clone().contiguous() for name, x in out.items()}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """(main model of transformers, its MtpModel of two depths, a folder of both as they are released)."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    of = {**SMALL, **MOE, **MLA, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "rope_parameters": YARN}
    main = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**of, num_mtp_layers=2)).float().eval()
    mtp = MtpModel(main, 2).float().eval()
    with torch.no_grad():
        for of_model in (main, mtp.layers):
            for name, p in [*of_model.named_parameters(), *of_model.named_buffers()]:
                if "inv_freq" not in name:
                    p.normal_(std=0.15 if p.dim() > 1 else 0.02 if "correction" in name else 0.3)
                    p.add_(1.0 if "norm" in name else 0.0)
    path = tmp_path_factory.mktemp("deepseek") / "model"
    main.save_pretrained(path)
    bare = path.with_name("bare")
    main.save_pretrained(bare)
    file = path / "model.safetensors"
    save_file(load_file(file) | released_names(mtp, 3), file, {"format": "pt"})
    return main, mtp, path, bare


def test_deepseek_predicts_what_transformers_does(deepseek):
    main, mtp, path, _ = deepseek
    of = hf.decoder(path)
    assert of.mtp.depths == 2
    layouts = model.layouts(of, ONE)
    params = hf.load(path, of, layouts)
    text = torch.randint(3, 70, (2, 27), generator=torch.Generator().manual_seed(1))
    ahead = torch.stack((text[:, 2:26], text[:, 3:27]), -1)  # a loader that knows the tokens behind the row
    batch = {"tokens": text[:, :24], "labels": text[:, 1:25], "ahead": ahead}
    with torch.no_grad():
        metrics = step.means(model.loss(params, batch, of, Axes(ONE))[0], Axes(ONE))
        h = main.model(batch["tokens"]).last_hidden_state
        for n in range(2):
            ids, positions = text[:, 1 + n : 25 + n], torch.arange(1 + n, 25 + n)[None]
            h = mtp.forward_layer(n, h, positions, None, input_ids=ids)
            want = F.cross_entropy(main.lm_head(h).flatten(0, 1), ahead[..., n].flatten())
            torch.testing.assert_close(metrics[f"mtp_{n + 1}"], want, rtol=1e-5, atol=1e-6)


def test_deepseeks_weights_come_back_bit_for_bit(deepseek, tmp_path):
    path = deepseek[2]
    of = hf.decoder(path)
    layouts = model.layouts(of, ONE)
    hf.save(tmp_path / "back", hf.load(path, of, layouts), of, layouts, like=path)
    before, after = (checkpoint.restore(interop.source(folder)) for folder in (path, tmp_path / "back"))
    assert set(before) == set(after) and any("model.layers.4.eh_proj" in name for name in before)
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_a_folder_without_them(deepseek, recwarn):
    path, bare = deepseek[2:]
    with pytest.warns(UserWarning, match=r"got no weights of multi-token prediction, wanted those of 2 depths"):
        of = hf.decoder(bare)
    assert of == hf.decoder(bare, mtp=None) == hf.decoder(path, mtp=None)
    assert set(hf.load(path, of, model.layouts(of, ONE))) == set(model.layouts(of, ONE))
