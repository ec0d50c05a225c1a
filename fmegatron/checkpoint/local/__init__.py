"""Replicas on the nodes' own storage: fast saves, and recovery from peers when nodes are lost."""
