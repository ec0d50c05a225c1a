"""Replicas on the nodes' own storage: fast saves, and recovery from peers when nodes are lost."""

from fmegatron.checkpoint.local.cliques import cliques
from fmegatron.checkpoint.local.replicas import LocalReplicas

__all__ = ["LocalReplicas", "cliques"]
