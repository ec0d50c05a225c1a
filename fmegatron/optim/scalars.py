"""0-d values shared by an update: computed once, on the device, in the dtype of the leaves that use them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmegatron import tree
from fmegatron.tree import arithmetic


def per_dtype(
    leaves_of: Any, compute: Callable[[torch.dtype], Sequence[torch.Tensor]]
) -> dict[torch.dtype, tuple[torch.Tensor, ...]]:
    """`tree.stored(*compute(dtype))` for each dtype among the leaves of a tree: no leaf is promoted, even if 0-d."""
    dtypes = dict.fromkeys(leaf.dtype for leaf in tree.leaves(leaves_of))
    return {dtype: arithmetic.stored(*compute(dtype)) for dtype in dtypes}
