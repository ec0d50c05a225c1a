"""How big and how much work a model is, counted from its arrays."""

from __future__ import annotations

import math
from collections import Counter

from fmegatron import tree
from fmegatron.model.array_specs import arrays
from fmegatron.model.arrays import Array
from fmegatron.model.decoder import Decoder


def parameters(decoder: Decoder) -> dict[str, int]:
    """Number of parameters by part ("embed", the parts of the blocks, "norms", "mtp", "head") and in "total".

    With padding of the vocabulary; "mtp" is all of the blocks that predict more tokens.

    >>> from fmegatron.model import llama
    >>> parameters(llama(vocab_size=64, dim=8, layers=2, heads=2, kv_heads=1, ffn_dim=16, max_seq=4))
    {'embed': 512, 'attention': 384, 'mlp': 768, 'norms': 40, 'head': 512, 'total': 2216}
    """
    whole = arrays(decoder)
    names = dict.fromkeys(part.name for parts in decoder.blocks for part in parts)
    size = dict.fromkeys(("embed", *names, "norms", "mtp", "head"), 0)
    for path, array in zip(tree.paths(whole), tree.leaves(whole), strict=True):
        first, *rest = path.split("/")
        name = rest[0] if first in decoder.stacks and first != "mtp" else first
        size[name if name in size else "norms"] += math.prod(array.shape)
    return {**{name: n for name, n in size.items() if n or name in ("norms", "head")}, "total": sum(size.values())}


def flops_per_token(
    decoder: Decoder, seq_len: int | None = None, *, training: bool = True, causal: bool = True
) -> dict[str, int]:
    """Multiply-adds times 2 that one token needs, by part ("matmul", "attention", "head") and in "total".

    seq_len: default max_seq. training: forward and backward (3 times the forward; recomputation is not counted, as in
    model FLOPs utilisation). causal: a token looks at (S + 1) / 2 keys on average; False counts all S, as PaLM's
    formula does. Multi-token prediction is counted in training. The embedding lookup is no arithmetic; norms, RoPE and
    softmax are left out (below 1 %). Of a mixer whose `Mixer.products` are not known those with its arrays are counted,
    and plans say so.
    Source: PaLM, arXiv 2204.02311, appendix B.

    >>> from fmegatron.model import llama
    >>> model = llama(vocab_size=64, dim=8, layers=2, heads=2, kv_heads=1, ffn_dim=16, max_seq=7)
    >>> flops_per_token(model, training=False)
    {'matmul': 2304, 'attention': 256, 'head': 1024, 'total': 3584}
    """
    S = decoder.max_seq if seq_len is None else seq_len
    times = 3 if training else 1
    weights, products = 0.0, 0.0
    depths = decoder.mtp.depths if decoder.mtp is not None and training else 0
    behind = [decoder.mtp.block] * depths if decoder.mtp is not None else []
    for part, n in Counter(part for parts in (*decoder.blocks, *behind) for part in parts).items():
        of_part: list[Array] = tree.leaves(part.mixer.arrays(decoder.dim))
        weights += n * sum(math.prod(array.shape) * array.used for array in of_part if len(array.shape) > 1)
        products += n * (part.mixer.products(S, causal) or 0.0)
    weights += depths * 2 * decoder.dim**2  # what joins hidden state and embedding
    parts = {
        "matmul": round(times * 2 * weights),
        "attention": round(times * products),  # q·k, then p·v
        "head": times * 2 * decoder.dim * decoder.padded_vocab * (1 + depths),
    }
    return {**parts, "total": sum(parts.values())}


def cache_bytes_per_token(decoder: Decoder) -> int:
    """Bytes that the key/value cache of sampling holds per token of one sequence, over all tp ranks together.

    Raises ValueError for a mixer that does not know its `Mixer.cache_width`.
    """
    widths = {part: part.mixer.cache_width for parts in decoder.blocks for part in parts}
    if unknown := [part for part, width in widths.items() if width is None]:
        raise ValueError(
            f"Part {unknown[0].name!r}: got a {type(unknown[0].mixer).__name__} without cache_width, wanted the "
            "numbers that generation keeps for a token of it; write the property (0 for a state of fixed size)"
        )
    every = (widths[part] for parts in decoder.blocks for part in parts)
    return sum(width for width in every if width) * decoder.compute_dtype.itemsize
