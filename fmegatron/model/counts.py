"""How big and how much work a model is, counted from its structure."""

from __future__ import annotations

import math

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.model.config import Config
from fmegatron.model.specs import specs


def parameters(config: Config) -> dict[str, int]:
    """Number of parameters by part ("embed", "attention", "mlp", "norms", "head") and in "total", padding included.

    >>> config = Config(vocab_size=64, dim=8, layers=2, heads=2, kv_heads=1, ffn_dim=16, max_seq=4)
    >>> parameters(config)
    {'embed': 512, 'attention': 384, 'mlp': 768, 'norms': 40, 'head': 512, 'total': 2216}
    """
    arrays = specs(config, Mesh())
    size = dict(zip(tree.paths(arrays), (math.prod(spec.shape) for spec in tree.leaves(arrays)), strict=True))

    def total(*words):
        return sum(n for path, n in size.items() if any(word in path for word in words))

    parts = {name: total(f"{name}/") for name in ("embed", "attention", "mlp")}
    return {**parts, "norms": total("norm"), "head": total("head/"), "total": sum(size.values())}


def flops_per_token(
    config: Config, seq_len: int | None = None, *, training: bool = True, causal: bool = True
) -> dict[str, int]:
    """Multiply-adds times 2 that one token needs, by part ("matmul", "attention", "head") and in "total".

    seq_len: default max_seq. training: forward and backward (3 times the forward; recomputation is not counted, as in
    model FLOPs utilisation). causal: a token looks at (S + 1) / 2 keys on average; False counts all S, as PaLM's
    formula does. The embedding lookup is no arithmetic; norms, RoPE and softmax are left out (below 1 %).
    Source: PaLM, arXiv 2204.02311, appendix B.

    >>> config = Config(vocab_size=64, dim=8, layers=2, heads=2, kv_heads=1, ffn_dim=16, max_seq=7)
    >>> flops_per_token(config, training=False)
    {'matmul': 2304, 'attention': 256, 'head': 1024, 'total': 3584}
    """
    S = config.max_seq if seq_len is None else seq_len
    times = 3 if training else 1
    weights = config.layers * (
        config.dim * (2 * config.heads + 2 * config.kv_heads) * config.head_dim + 3 * config.dim * config.ffn_dim
    )
    keys = (S + 1) / 2 if causal else S
    parts = {
        "matmul": times * 2 * weights,
        "attention": round(times * config.layers * 2 * 2 * keys * config.heads * config.head_dim),  # q·k, then p·v
        "head": times * 2 * config.dim * config.padded_vocab,
    }
    return {**parts, "total": sum(parts.values())}


def cache_bytes_per_token(config: Config) -> int:
    """Bytes that the key/value cache of sampling holds per token of one sequence, over all tp ranks together."""
    return config.layers * 2 * config.kv_heads * config.head_dim * config.compute_dtype.itemsize
