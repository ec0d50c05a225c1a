"""Shakespeare, character by character: a small Llama on any mesh, stopped and resumed at will.

Claim    A decoder of 1.8 M parameters reaches a held-out loss below 1.75 nats per character after 500 steps of 2,048
         characters (one pass over the text), and the mesh it runs on, or moves to half-way, changes only the speed.
Command  torchrun --nproc-per-node=4 experiments/shakespeare.py --mesh=fsdp=2,tp=2        (on one rank: python, no mesh)
         Stop it with Ctrl-C, or a SIGTERM to any rank; the same command, with any mesh, goes on from there.
Expect   held-out 2.15 at step 100, 1.95 at 200, 1.72 at 500; three minutes on 2 cores.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fmegatron import data, loop, model, optim, step
from fmegatron.layout import Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data/tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:  # what this experiment varies; how it runs (folder, steps, seed, saves, faults): --run.NAME, see --help
    mesh: Mesh = Mesh()  # axes dp, fsdp, tp; their product is the number of ranks
    strategy: str = field("hsdp", resume="named")  # replicated, zero1, zero2, zero3, hsdp (fsdp inside of dp), hybrid
    run: loop.Options = loop.Options("runs/shakespeare")
    dim: int = field(192, resume="refused")
    layers: int = field(4, resume="refused")
    heads: int = field(6, resume="refused")
    multiple: int = field(1, resume="refused", least=1)  # of the MLP and the vocabulary: 3 for tp=3 and tp=6
    seq_len: int = field(128, resume="refused")
    batch_size: int = field(16, resume="refused", least=1)  # sequences per step, all ranks together
    microbatches: int = field(1, resume="named", least=1)  # of each rank, one after the other, in a step
    pipeline: step.Pipelining = step.Pipelining()  # of stages over an axis pp of the mesh
    lr: float = field(2e-3, resume="named", above=0)  # peak learning rate
    warmup: int = field(50, resume="named", least=0)  # steps
    weight_decay: float = field(0.1, resume="named", least=0)
    eval_windows: int = field(256, resume="named", least=1)  # held-out sequences of each evaluation
    prompts: tuple[str, ...] = field(("ROMEO:", "QUEEN:"), resume="free")  # equally long beginnings of samples
    sample: int = field(120, resume="free", least=0)  # characters of each

    def __post_init__(self):
        loop.check(self), trained(self, vocab_size=1)
        lengths = sorted({len(text) for text in self.prompts}) or [1]
        if not 1 <= lengths[0] == lengths[-1] < self.seq_len:
            raise ValueError(f"Config.prompts: got lengths {lengths}, wanted one length of 1 to {self.seq_len - 1}")


def trained(of, vocab_size):
    sizes = {"dim": of.dim, "layers": of.layers, "heads": of.heads, "kv_heads": of.heads, "max_seq": of.seq_len}
    multiples = {"ffn_dim": of.dim * 8 // 3 // of.multiple * of.multiple, "vocab_multiple": 64 * of.multiple}
    rate = optim.cosine(of.lr, of.run.steps, of.warmup, end=of.lr / 10)
    return model.llama(vocab_size, **sizes, **multiples, tied=True), optim.adamw(rate, weight_decay=of.weight_decay)


@cache
def corpus(path):
    tokenizer = data.CharTokenizer.from_text(text := path.read_text())
    return tokenizer, (ids := tokenizer.encode(text)), *data.train_and_held_out(ids)


def describe(config):
    of, optimizer = trained(config, corpus(TEXT)[0].vocab_size)
    rows, parts = (config.batch_size, config.seq_len), config.pipeline.of(config.microbatches)
    return model.build(of, optimizer, config.mesh, rows, strategy=config.strategy, microbatches=parts)


def read(config):
    tokenizer, ids, train, _ = corpus(TEXT)
    tokenizer.encode("".join(config.prompts))  # a character that the text does not have ends the program now
    return data.Batches(ids, config.batch_size, config.seq_len, config.run.seed, train)


def held_out(config):
    (_, ids, _, part), sizes = corpus(TEXT), (config.batch_size, config.seq_len)
    return {"heldout": data.EvaluationBatches(ids, *sizes, part, config.eval_windows)}


def write(config, run):
    prompts = [corpus(TEXT)[0].encode(text).tolist() for text in config.prompts]
    count, how = min(config.sample, config.seq_len - len((prompts or [""])[0])), {"temperature": 0.8, "top_p": 0.95}
    rows = model.generate(run.inference(), prompts, count, key=config.run.seed, **how) if prompts else ()
    for text, row in zip(config.prompts, rows, strict=True):
        print(f"\n{text}{corpus(TEXT)[0].decode(row.tolist())}")


experiment = loop.Experiment(Config, describe, read, held_out, finish=write, tokenizer=lambda _: corpus(TEXT)[0])

if __name__ == "__main__":
    loop.launch(experiment)
