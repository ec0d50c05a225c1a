"""The attribute in which an array carries its layout."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class Label:
    """A `Layout` as an attribute of arrays. layout: that they have; Any, as its file imports this one.

    torch pickles the attributes of a tensor: the pickle of a label is an empty OrderedDict, which a file that is opened
    with weights_only=True may hold, and which states nothing.
    """

    __slots__ = ("layout",)

    def __init__(self, layout: Any):
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Label):
            return self is other
        a, b = self.layout, other.layout
        return a == b and (a.lead, a.beside) == (b.lead, b.beside)  # a graph may go by what dims mean

    def __hash__(self) -> int:
        return hash(self.layout)

    def __repr__(self) -> str:
        return f"Label({self.layout})"

    def __deepcopy__(self, memo: dict) -> Label:
        return self

    def __reduce__(self):
        return OrderedDict, ()
