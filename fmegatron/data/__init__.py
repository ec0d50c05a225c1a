"""data: tokenizers, memory-mapped token files, and batches as pure functions of (seed, step)."""

from fmegatron.data.batches import Batches, EvaluationBatches, train_and_held_out
from fmegatron.data.documents import Tokens
from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.indexed import IndexedTokens
from fmegatron.data.steps import Batch, RankBatches, StepBatches
from fmegatron.data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer
from fmegatron.data.tokens import TokenArray, write_tokens
from fmegatron.data.write_indexed import IndexedWriter, merge_indexed, token_dtype, write_indexed

__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "CharTokenizer",
    "EvaluationBatches",
    "IndexedTokens",
    "IndexedWriter",
    "RankBatches",
    "StepBatches",
    "TokenArray",
    "Tokens",
    "fingerprint",
    "load_tokenizer",
    "merge_indexed",
    "token_dtype",
    "train_and_held_out",
    "write_indexed",
    "write_tokens",
]
