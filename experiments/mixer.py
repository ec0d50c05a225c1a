"""A causal MLP-Mixer as a language model, with an average of its weights, which is what is evaluated.

Claim    Positions mixed by learned lower triangular matrices, without attention, learn to predict the next byte, by the
         same losses on every mesh. What is evaluated is the average of the weights.
Command  torchrun --nproc-per-node=4 experiments/mixer.py --mesh=dp=2,fsdp=2
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch.nn.functional as F

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.layout import Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()  # axes dp and fsdp
    run: loop.Options = loop.Options("runs/mixer", steps=1000)
    dim: int = 128
    layers: int = 4
    seq_len: int = 64
    batch_size: int = 32
    microbatches: int = loop.field(1, resume="named", least=1)
    pipeline: step.Pipelining = step.Pipelining()  # of stages over an axis pp of the mesh
    lr: float = loop.field(3e-3, resume="named", above=0)
    decay: float = 0.99  # of the average of the weights, for each step


def block(x_BSD, w):
    """Mix positions, each with those before it, then channels."""
    u_BSD = nn.rms_norm(x_BSD, w["position_norm"])
    x_BSD = x_BSD + w["last"].tril() @ F.gelu(w["first"].tril() @ u_BSD)
    return x_BSD + F.gelu(nn.rms_norm(x_BSD, w["channel_norm"]) @ w["up"]) @ w["down"]


def model(config: Config):
    """(specs, loss_fn) of the mixer on the mesh of the config."""
    D, L, S = config.dim, config.layers, config.seq_len
    blocks = {"position_norm": (L, D), "first": (L, S, S), "last": (L, S, S)}
    blocks |= {"channel_norm": (L, D), "up": (L, D, 4 * D), "down": (L, 4 * D, D)}
    shapes = {"embed": (256, D), "blocks": blocks, "final_norm": (D,), "head": (D, 256)}
    init = [(r"\w+_norm", 1.0), (".*", tree.Normal(0.02))]
    stacked = [("blocks", config.pipeline.split(config.mesh, L))]  # with their stages, where the mesh has pp
    # "hsdp": parameters are sharded over fsdp, and replicated over dp
    specs = tree.specs(shapes, config.mesh, init=init, strategy="hsdp", stacked=stacked)

    def loss_fn(w, batch):
        x_BSD = w["blocks"].run(block, w["embed"][batch["tokens"]])
        logits_BSV = nn.rms_norm(x_BSD, w["final_norm"]) @ w["head"]
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return step.mean(loss, batch["labels"].numel())  # the step adds both up, and divides

    return specs, loss_fn


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch, and what an evaluation computes: of the average."""
    (specs, loss_fn), shape = model(config), (config.batch_size, config.seq_len)
    rate = optim.cosine(config.lr, config.run.steps, warmup=config.run.steps // 10)
    optimizer = optim.averaged(optim.adamw(rate), config.decay)

    rows, parts = {"tokens": shape, "labels": shape}, config.pipeline.of(config.microbatches)
    value = step.build(loss_fn, optimizer, specs, rows, microbatches=parts)

    def evaluate(state, batch):  # as the step evaluates, by stages where it has some
        return value.evaluate(state._replace(params=step.averaged_params(state)), batch)

    return replace(value, evaluate=evaluate)


def text():
    """(bytes of the text, of which range is trained on, and which is held out)."""
    ids = data.ByteTokenizer().encode(TEXT.read_text())
    return ids, *data.train_and_held_out(ids)


def read(config: Config):
    """What is trained on."""
    ids, train, _ = text()
    return data.Batches(ids, config.batch_size, config.seq_len, config.run.seed, train)


def held_out(config: Config):
    """What is evaluated."""
    ids, _, part = text()
    return {"held_out": data.EvaluationBatches(ids, config.batch_size, config.seq_len, part, config.batch_size * 4)}


experiment = loop.Experiment(Config, describe, read, held_out)

if __name__ == "__main__":
    loop.launch(experiment)
