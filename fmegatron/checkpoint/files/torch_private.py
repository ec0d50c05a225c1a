"""Every private name of torch that this room uses, in one place. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import torch

__all__ = ["copy_all"]

copy_all = torch._foreach_copy_  # (into, source, non_blocking)
