"""The cache of a batch, and caches of earlier texts, in memory and on disk."""
