"""Save: who writes what, the chunks and their digests, and the manifest of what all ranks have written."""
