"""Replicas on the nodes' own storage: fast saves, and recovery from peers when nodes are lost."""

from fmegatron.moved import no_name as _no_name

globals()["__getattr__"] = _no_name(__name__)
