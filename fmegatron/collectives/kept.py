"""A mark on gathers of a traced step: what they bring is kept from the forward to the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch.fx import traceback

__all__ = ["is_kept", "kept"]

_MARK = "fmegatron_kept"


def kept() -> contextlib.AbstractContextManager:
    """Gathers that are traced inside are left where they are, and not made again for the backward (`step.regather`)."""
    return traceback.annotate({_MARK: True})


def is_kept(meta: Mapping[str, Any]) -> bool:
    """Whether the node with this meta was traced so."""
    return bool(meta.get("custom", {}).get(_MARK))
