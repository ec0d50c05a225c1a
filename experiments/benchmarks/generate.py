"""Tokens per second of generation, compiled, against `transformers.generate` with the same weights on the CPU.

    make bench-generate
    python experiments/benchmarks/generate.py [--rounds=7] [--quick]

A Llama of 4 layers of width 256 with 8,192 ids, fp32, one thread; prompts of 32 tokens and 128 greedy tokens, the
reading of the prompt included, one text and 8. Both must write the same texts before anything is timed. A ratio is the
median over rounds of the peer's seconds / ours. "compiled again" counts the forms that prompts of other lengths, other
counts and rows of different lengths add: none. JSON lines on stdout, a table on stderr.
"""

import argparse
import tempfile

import torch
import transformers

from fmegatron import model, step
from fmegatron.collectives import Axes
from fmegatron.interop import hf
from fmegatron.layout import Mesh
from fmegatron.testing.measure import paired_seconds, report

PROMPT, COUNT, VOCAB = 32, 128, 8192


def peer() -> transformers.LlamaForCausalLM:
    """Their Llama, of random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    where = f"CPU, 1 thread, torch {torch.__version__}, transformers {transformers.__version__}"
    theirs, made, mesh = peer(), [], Mesh()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        decoder = hf.decoder(folder)
        layouts = model.layouts(decoder, mesh)
        params = hf.load(folder, decoder, layouts)

    def compiled(fn, donate=None):
        made.append(step.jit(fn, donate=donate))
        return made[-1]

    def forms() -> int:
        return sum(len(fn.cache) for fn in made)

    for rows, bar in ((1, ">= 2.0"), (8, ">= 1.5")):
        writer = model.inference(params, decoder, Axes(mesh), compile=compiled)
        prompts = torch.randint(0, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(1))

        def ours(writer=writer, prompts=prompts):
            return model.generate(writer, prompts, COUNT, temperature=0)

        def other(prompts=prompts):
            mask = torch.ones_like(prompts)
            found = theirs.generate(prompts, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
            return found[:, PROMPT:]

        assert torch.equal(ours(), other()), "the two write different texts"
        pairs = paired_seconds(ours, other, 2 if given.quick else given.rounds)
        note = f"{rows * COUNT / min(a for a, _ in pairs):.0f} tokens/s"
        ratios = [b / a for a, b in pairs]
        how = {"unit": "ratio", "where": where, "against": "transformers.generate", "bar": bar, "note": note}
        report(f"decode_tokens_per_second_batch_{rows}", ratios, **how)
        before = forms()
        for length, count in ((7, 40), (63, 100), (100, 20)):
            model.generate(writer, prompts[:, :1].expand(-1, length), count, temperature=0.7)
        model.generate(writer, [row[: 3 + i] for i, row in enumerate(prompts)], 30, temperature=0)
        again = [float(forms() - before)]
        report(f"compiled_again_for_other_lengths_batch_{rows}", again, unit="forms", where=where, bar="<= 0")


if __name__ == "__main__":
    main()
