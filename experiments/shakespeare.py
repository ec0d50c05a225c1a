"""Shakespeare, character by character: a small Llama on any mesh, stopped and resumed at will.

Claim    A decoder of 1.8 M parameters reaches a held-out loss below 1.75 nats per character after 500 steps of 2,048
         characters (one pass over the text), and the mesh it runs on, or moves to half-way, changes only the speed.
Command  python experiments/shakespeare.py
         torchrun --nproc-per-node=4 experiments/shakespeare.py --mesh=fsdp=2,tp=2
         Stop it with Ctrl-C, or a SIGTERM to any rank; the same command, with any mesh, goes on from there.
Expect   held-out 2.15 at step 100, 1.95 at 200, 1.72 at 500; three minutes on 2 cores.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from fmegatron import data, loop, model, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = field(Mesh(), resume="named")  # axes dp, fsdp, tp; their product is the number of ranks
    strategy: str = field("hsdp", resume="named")  # replicated, zero1, zero2, zero3, hsdp (fsdp inside of dp), hybrid
    run: loop.Options = loop.Options("runs/shakespeare")
    dim: int = field(192, resume="refused")
    layers: int = field(4, resume="refused")
    heads: int = field(6, resume="refused")
    seq_len: int = field(128, resume="refused")
    batch_size: int = field(16, resume="refused", least=1)  # sequences per step, all ranks together
    microbatches: int = field(1, resume="named", least=1)  # of each rank, one after the other, in a step
    lr: float = field(2e-3, resume="named", above=0)  # peak learning rate
    warmup: int = field(50, resume="named", least=0)  # steps
    weight_decay: float = field(0.1, resume="named", least=0)
    eval_windows: int = field(256, resume="named", least=1)  # held-out sequences of each evaluation
    prompts: tuple[str, ...] = field(("ROMEO:", "QUEEN:"), resume="free")  # equally long beginnings of samples
    sample: int = field(120, resume="free", least=0)  # characters of each

    def __post_init__(self):
        loop.check(self)
        model_config(self, vocab_size=1), rate(self), DataParallel.named(self.strategy)
        lengths = sorted({len(prompt) for prompt in self.prompts})
        if lengths and not (len(lengths) == 1 and 1 <= lengths[0] < self.seq_len):
            raise ValueError(f"Config.prompts: got lengths {lengths}, wanted one length of 1 to {self.seq_len - 1}")


def model_config(config: Config, vocab_size: int) -> model.Decoder:
    """The decoder. Its layouts on any mesh follow from its arrays."""
    sizes = {"dim": config.dim, "layers": config.layers, "heads": config.heads, "kv_heads": config.heads}
    return model.llama(vocab_size, **sizes, ffn_dim=config.dim * 8 // 3, max_seq=config.seq_len, tied=True)


def make_loss(config: Config, of: model.Decoder):
    """loss(params, batch) -> (parts of the loss, metrics), over the axes of the mesh."""
    layouts = model.layouts(of, config.mesh, strategy=DataParallel.named(config.strategy))
    return functools.partial(model.loss, decoder=of, layouts=layouts, axes=Axes(config.mesh), save="mincut")


def rate(config: Config) -> optim.Schedule:
    """The learning rate of each step."""
    return optim.cosine(config.lr, config.run.steps, config.warmup, end=config.lr / 10)


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch, for `main` and for `python -m fmegatron.check`."""
    of = model_config(config, data.CharTokenizer.from_text(TEXT.read_text()).vocab_size)
    strategy, axes = DataParallel.named(config.strategy), Axes(config.mesh)
    specs = model.specs(of, config.mesh, strategy=strategy)
    optimizer = optim.adamw(rate(config), weight_decay=config.weight_decay)
    how = {"strategy": strategy, "microbatches": config.microbatches}
    train_step = step.build_train_step(make_loss(config, of), optimizer, tree.layouts(specs), axes, **how)
    rows = strategy.batch_layout((config.batch_size, config.seq_len), torch.int64, config.mesh, config.microbatches)
    specs = step.state_specs(specs, optimizer, strategy)
    return step.Description(train_step, specs, {"tokens": rows, "labels": rows}, config.microbatches, of, save="mincut")


def main(config: Config) -> dict[str, float]:
    """Train (or go on), evaluate, write a sample; returns the last held-out metrics. Ends early when asked to stop."""
    with loop.set_up():  # nothing is written here, and what cannot be meant is refused
        world = connect(config.mesh)
        tokenizer = data.CharTokenizer.from_text(TEXT.read_text())
        ids = tokenizer.encode(TEXT.read_text())
        train_range, heldout_range = data.train_and_held_out(ids)
        batches = data.Batches(ids, config.batch_size, config.seq_len, config.run.seed, train_range)
        prompts = [torch.from_numpy(tokenizer.encode(text)).long() for text in config.prompts]
        heldout = data.EvaluationBatches(ids, config.batch_size, config.seq_len, heldout_range, config.eval_windows)

        of = model_config(config, tokenizer.vocab_size)
        loss_fn, described = make_loss(config, of), describe(config)

        @functools.partial(step.jit, world=world, backend=config.run.backend)
        def heldout_step(params, batch):
            return step.means({"heldout_loss": loss_fn(params, batch)[0]["lm"]}, Axes(config.mesh))

        def evaluate(state):
            rows = loop.own_rows(heldout, described, world)
            return loop.evaluate(heldout_step, state.params, rows, len(heldout))

        run = loop.Run(
            config.run.folder,
            step.jit(described.function, donate=0, world=world, backend=config.run.backend),
            described,
            world=world,
            settings=loop.Settings(config, kept=model.kept(of, tokenizer)),
            evaluate=evaluate,
        )
    for _ in run(batches, config.run.steps):
        pass
    if run.stopped:
        return run.metrics

    if prompts:
        axes, prompt = Axes(config.mesh, world if world.size > 1 else None), world.put(torch.stack(prompts))
        params, layouts = run.state.params, tree.layouts(described.state.params)
        count = min(config.sample, config.seq_len - prompt.shape[1])
        writer = model.inference(params, of, layouts, axes)
        written = model.generate(writer, prompt, count, key=config.run.seed, temperature=0.8, top_p=0.95)
        for text, row in zip(config.prompts, written, strict=True):
            print(f"\n{text}{tokenizer.decode(row.tolist())}")
    return run.metrics or evaluate(run.state)


if __name__ == "__main__":
    loop.launch(main, Config)
