"""data: tokenizers, memory-mapped token files, and batches as pure functions of (seed, step)."""

from fmegatron.data.batches import Batches, EvaluationBatches, train_and_held_out
from fmegatron.data.blend import Blend
from fmegatron.data.chat import Chats, chat_row
from fmegatron.data.contract import Source, source
from fmegatron.data.documents import Tokens
from fmegatron.data.fill_in import FillInTheMiddle
from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.indexed import IndexedTokens
from fmegatron.data.megatron_order import Megatron, megatron_split
from fmegatron.data.open_tokenizer import Tokenizer, load_tokenizer
from fmegatron.data.packing import Packing, load_packing, pack
from fmegatron.data.prepare import prepare
from fmegatron.data.reader import Reader, ahead
from fmegatron.data.sources import Mapped, SourceBatches, Stream
from fmegatron.data.steps import Batch, RankBatches, StepBatches
from fmegatron.data.subword import SubwordTokenizer
from fmegatron.data.template import ChatTemplate, load_template
from fmegatron.data.tokenizers import ByteTokenizer, CharTokenizer
from fmegatron.data.tokens import TokenArray, write_tokens
from fmegatron.data.write_indexed import IndexedWriter, merge_indexed, token_dtype, write_indexed

__all__ = [
    "Batch",
    "Batches",
    "Blend",
    "ByteTokenizer",
    "CharTokenizer",
    "EvaluationBatches",
    "ChatTemplate",
    "Chats",
    "FillInTheMiddle",
    "IndexedTokens",
    "IndexedWriter",
    "Mapped",
    "Megatron",
    "Packing",
    "RankBatches",
    "Reader",
    "Source",
    "SourceBatches",
    "StepBatches",
    "Stream",
    "TokenArray",
    "Tokens",
    "ahead",
    "chat_row",
    "fingerprint",
    "load_packing",
    "load_template",
    "SubwordTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "megatron_split",
    "merge_indexed",
    "pack",
    "prepare",
    "source",
    "token_dtype",
    "train_and_held_out",
    "write_indexed",
    "write_tokens",
]
