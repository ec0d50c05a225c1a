"""data: tokenizers, memory-mapped token files, and batches as pure functions of (seed, step)."""

from fmegatron.data.batches import (
    Batch,
    Batches,
    EvaluationBatches,
    RankBatches,
    Tokens,
    train_and_held_out,
)
from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer
from fmegatron.data.tokens import TokenArray, write_tokens

__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "CharTokenizer",
    "EvaluationBatches",
    "RankBatches",
    "TokenArray",
    "Tokens",
    "fingerprint",
    "load_tokenizer",
    "train_and_held_out",
    "write_tokens",
]
