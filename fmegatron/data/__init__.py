"""data: tokenizers, memory-mapped token files, and batches as pure functions of (seed, step)."""

from fmegatron.data.batches import Batches, EvaluationBatches, train_and_held_out
from fmegatron.data.blend import Blend
from fmegatron.data.chat import Chats
from fmegatron.data.contract import Source, source
from fmegatron.data.fill_in import FillInTheMiddle
from fmegatron.data.indexed import IndexedTokens
from fmegatron.data.indexed_writer import write_indexed
from fmegatron.data.megatron_order import Megatron, megatron_split
from fmegatron.data.open_tokenizer import Tokenizer, load_tokenizer
from fmegatron.data.packing import load_packing, pack
from fmegatron.data.sources import Mapped, SourceBatches, Stream
from fmegatron.data.template import load_template
from fmegatron.data.tokenizers import ByteTokenizer, CharTokenizer
from fmegatron.moved import no_name as _no_name

__all__ = [
    "Batches",
    "Blend",
    "ByteTokenizer",
    "CharTokenizer",
    "Chats",
    "EvaluationBatches",
    "FillInTheMiddle",
    "IndexedTokens",
    "Mapped",
    "Megatron",
    "Source",
    "SourceBatches",
    "Stream",
    "Tokenizer",
    "load_packing",
    "load_template",
    "load_tokenizer",
    "megatron_split",
    "pack",
    "source",
    "train_and_held_out",
    "write_indexed",
]

globals()["__getattr__"] = _no_name(__name__)
