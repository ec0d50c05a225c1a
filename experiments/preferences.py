"""Preferences: a model learns to prefer one text to another, by direct preference optimization (arXiv 2305.18290).

Claim    After 60 steps the policy prefers the chosen text of a new pair more than its reference does in over 90 % of
         pairs (accuracy; 0 at step 1, where the two are equal), and the mesh changes only the speed.
Command  python experiments/shakespeare.py; torchrun --nproc-per-node=4 experiments/preferences.py --mesh=fsdp=2,tp=2
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from fmegatron import data, loop, model, optim, step, tree
from fmegatron.layout import Mesh
from fmegatron.loop import field


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()  # axes dp, fsdp, tp
    run: loop.Options = loop.Options("runs/preferences", steps=60)
    beginning: str = field("runs/shakespeare", resume="refused")  # the run whose model is the reference too
    text: str = field("data/tinyshakespeare.txt", resume="free")
    pairs: int = field(8, resume="refused", least=1)  # of a step, all ranks together
    seq_len: int = field(64, resume="refused", least=4)
    beta: float = field(0.1, resume="named", above=0)
    lr: float = field(2e-4, resume="named", above=0)


@cache
def begun(folder):
    """The model of a run, and its tokenizer."""
    return model.opened(folder)


def describe(config):
    """One state of two models, of which one is trained."""
    of = begun(config.beginning).decoder
    policy = tree.named(model.specs(of, config.mesh, strategy="zero3"))
    specs = {"policy": policy, "reference": tree.copies(policy)}

    def log_p(params, texts):
        """Of each text, [pairs, chosen or rejected]."""
        flat = texts.flatten(0, 1)
        batch = {"tokens": flat[:, :-1].contiguous(), "labels": flat[:, 1:].contiguous()}
        nll, _ = model.token_losses(params, batch, of, save="mincut")
        return -nll.sum(-1).view(-1, 2)

    def loss_fn(params, batch):
        gain = log_p(params["policy"], batch["texts"]) - log_p(params["reference"], batch["texts"])
        margin = config.beta * (gain[:, 0] - gain[:, 1])
        count = len(margin)
        right = (margin > 0).to(margin.dtype).sum()
        return step.mean(-F.logsigmoid(margin).sum(), count), {
            "margin": step.mean(margin.detach().sum(), count),
            "accuracy": step.mean(right, count),
        }

    rules = [("reference/.*", optim.Group(frozen=True))]
    optimizer = optim.grouped(config.lr, rules, adam=optim.scale_by_adam())
    return step.build(loss_fn, optimizer, specs, {"texts": (config.pairs, 2, config.seq_len + 1)}, shards=True)


def read(config):
    """Pairs by the number of a step: windows of the text, and the same with their second halves in disorder."""
    with open(config.text, encoding="utf-8") as file:
        ids = torch.from_numpy(begun(config.beginning).tokenizer.encode(file.read())).long()

    @data.source
    def pairs(position):
        draw, length = torch.Generator().manual_seed(position), config.seq_len + 1
        starts = torch.randint(len(ids) - length, (config.pairs,), generator=draw).tolist()
        chosen = torch.stack([ids[start : start + length] for start in starts])
        half = length // 2
        order = torch.cat([torch.arange(half), half + torch.randperm(length - half, generator=draw)])
        return {"texts": torch.stack([chosen, chosen[:, order]], 1)}

    return pairs


def init(config, described, world):
    """Both models are that of the run: what is given by the names of its parameters is taken for all copies of them."""
    policy = described.state.params["policy"]
    start = model.opened(config.beginning, config.mesh, world=world, layouts=policy).params
    return tree.init(described.state, config.run.seed, world.rank, world.device, given=start)


experiment = loop.Experiment(Config, describe, read, init=init)

if __name__ == "__main__":
    loop.launch(experiment)
