"""Every private name of torch and optree that this room uses, in one place."""

from optree.registry import __GLOBAL_NAMESPACE as EVERY_NAMESPACE  # optree has no public name for it

__all__ = ["EVERY_NAMESPACE"]
