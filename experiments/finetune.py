"""Finetune a model of Hugging Face: its folder, some steps on a text, and a folder that transformers loads.

Claim    A folder of any family of `fmegatron.model.families` opens on any mesh, trains there, and goes back.
Command  torchrun --nproc-per-node=4 experiments/finetune.py --model=Qwen2.5-0.5B --mesh=fsdp=2,tp=2
         The folder must have config.json and safetensors files; --text is a text, which its tokenizer reads
         (without one the ids of tokens are bytes), or a corpus, PREFIX.bin and PREFIX.idx. Afterwards
         python -m fmegatron.model chat runs/finetune
"""

import os
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Literal

from fmegatron import data, loop, model, optim, step, tree
from fmegatron.collectives import Precision
from fmegatron.interop import hf
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


# HSDP; ep has rows of its own, too.
STRATEGY = DataParallel(("dp", "fsdp", "ep"), ("fsdp",), ("fsdp",), ("fsdp",))


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    model: str = field("model", resume="refused", least=1)  # the folder it comes from
    out: str = field("runs/finetune/model", resume="free", least=1)  # and that it goes to, new
    text: str = field(str(TEXT), resume="refused", least=1)  # or PREFIX.bin
    mesh: Mesh = Mesh()  # axes dp, fsdp, tp; ep for experts, cp for long sequences
    run: loop.Options = loop.Options("runs/finetune", steps=50)
    seq_len: int = field(256, resume="refused", least=2)
    batch_size: int = field(8, resume="refused", least=1)
    microbatches: int = field(1, resume="named", least=1)
    pipeline: step.Pipelining = step.Pipelining()  # of stages over an axis pp of the mesh
    lr: float = field(1e-5, resume="named", above=0)
    precision: Literal["fp32", "bf16"] = field("fp32", resume="named")  # bf16: fp32 weights, bf16 products
    memory: Literal["device", "host", "host-update", "host-all"] = field("device", resume="free")  # of the state
    sequence_parallel: bool = field(True, resume="named")  # over tp
    dropout: bool = field(False, resume="named")  # whether the rates in config.json count (GPT-2's are 0.1)


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch."""
    optimizer = optim.adamw(optim.cosine(config.lr, config.run.steps, config.run.steps // 10))
    shape = (config.batch_size, config.seq_len)
    everything = [("params", "host"), (".*", "host")]
    memory = everything if config.memory == "host-all" else config.memory
    how = {"strategy": STRATEGY, "samples": True, "memory": memory}
    how["microbatches"] = config.pipeline.of(config.microbatches)
    return model.build(decoder(config), optimizer, config.mesh, shape, **how)


def decoder(config: Config) -> model.Decoder:
    """The model of the folder, as this run computes it."""
    precision = getattr(Precision, config.precision)()
    of = hf.decoder(config.model, precision=precision, sequence_parallel=config.sequence_parallel)
    of = of if config.dropout else model.deterministic(of)
    return of if config.mesh["cp"] == 1 else replace(of, blocks=tuple(tuple(map(ringed, block)) for block in of.blocks))


def ringed(part: model.Part) -> model.Part:
    """The same part; its attention, if it is one, goes round the ranks of cp."""
    fields = {field.name for field in fields_of(part.mixer)}
    return replace(part, mixer=replace(part.mixer, context="ring")) if "context" in fields else part


def tokenizer_of(config: Config) -> data.Tokenizer:
    """That of the folder."""
    kinds = {"tokenizer.json", "tokenizer.model", "spiece.model"}
    return data.load_tokenizer(config.model) if kinds & set(os.listdir(config.model)) else data.ByteTokenizer()


def token_ids(config: Config, vocab_size: int):
    """The corpus, or the text as the model's tokens. Raises ValueError where they are of another tokenizer."""
    tokenizer, fix = tokenizer_of(config), "prepare it with --tokenizer of the model's folder"
    if config.text.endswith((".bin", ".idx")):
        corpus = data.IndexedTokens(config.text)
        if (made := corpus.tokenizer) is not None and made.describe() != tokenizer.describe():
            raise ValueError(f"text: {config.text}: got a corpus of another tokenizer, wanted the model's; {fix}")
        largest, ids = int(corpus[: 1 << 20].max(initial=0)), corpus
    else:
        ids = tokenizer.encode(Path(config.text).read_text(encoding="utf-8"))
        largest = int(ids.max(initial=0))
    if largest >= vocab_size:
        raise ValueError(f"text: got token {largest}, wanted at most {vocab_size - 1}; {fix}")
    return ids


def read(config: Config):
    """The corpus, or the text, as the model's tokens."""
    if os.path.exists(config.out):
        raise ValueError(f"out: {config.out}: got a path that exists already, wanted a new one; choose another")
    ids = token_ids(config, decoder(config).vocab_size)
    return data.Batches(ids, config.batch_size, config.seq_len, config.run.seed)


def init(config: Config, described, world):
    """The weights of the folder, and what an optimizer begins with."""
    if world.rank == 0:  # the folder is this run's from here on
        tokenizer_of(config).save(Path(config.run.folder) / "tokenizer.json")
    params = hf.load(config.model, described.decoder, tree.layouts(described.state.params), world=world)
    return tree.init(described.state, config.run.seed, world.rank, world.device, given=params)


def write(config: Config, run: loop.Run):
    """The folder for transformers."""
    of, layouts = run.described.decoder, tree.layouts(run.described.state.params)
    hf.save(config.out, run.state.params, of, layouts, run.world, like=config.model)


experiment = loop.Experiment(Config, describe, read, init=init, finish=write, tokenizer=tokenizer_of)

if __name__ == "__main__":
    loop.launch(experiment)
