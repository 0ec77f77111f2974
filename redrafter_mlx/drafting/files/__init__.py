"""Drafters on disk: which form a folder holds, loading it, and exporting it."""
