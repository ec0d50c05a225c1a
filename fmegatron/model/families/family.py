"""A family as a value: how `config.json` becomes a Decoder, and what Hugging Face calls its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fmegatron.model.decoder import Decoder
from fmegatron.model.families.keys import Keys


@dataclass(frozen=True)
class Stored:
    """The stored tensors that one array of ours is made of, joined along its last dim as its `parts` say.

    names: `{i}` in them is the number of the block, `{e}` that of the expert (the first dim of our array). `name#k` is
    the k-th of the pieces that lie side by side in that tensor, of which others are parts of other arrays. transposed:
    a tensor is stored [out, in], as torch's Linear has it. depthwise: [channels, 1, width], as torch's Conv1d has it.
    """

    names: tuple[str, ...]
    transposed: bool = False
    depthwise: bool = False


def linear(*names: str) -> Stored:
    """Weights of torch's Linear, joined along their outputs."""
    return Stored(names, transposed=True)


def depthwise(*names: str) -> Stored:
    """Weights of torch's Conv1d that has a filter for each channel, joined along the channels."""
    return Stored(names, transposed=True, depthwise=True)


def plain(*names: str) -> Stored:
    """Tensors stored as ours are."""
    return Stored(names)


@dataclass(frozen=True)
class Family:
    """One family of models.

    name: Hugging Face's `model_type`. read: keys of config.json -> Decoder, given dtypes and the like as keywords.
    names: for each path of ours, without the name of the stack, what is stored. unused: regular expressions of stored
    names that the model does not have; `{behind}` in them is the number of a layer behind its blocks. repeated: names
    under which each depth of multi-token prediction stores an array of ours once more; they are written, not read.
    """

    name: str
    read: Callable[..., Decoder]
    names: Mapping[str, Stored]
    unused: tuple[str, ...] = ()
    repeated: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def decoder(self, config: Mapping[str, Any], **changes: Any) -> Decoder:
        """The model of a configuration; changes: fields of `Decoder` (dtypes, max_seq, sequence_parallel, ...).

        Raises ValueError, naming the key, for what the family does not understand.
        """
        keys = Keys(config, self.name)
        decoder = self.read(keys, **changes)
        keys.done()
        return decoder
