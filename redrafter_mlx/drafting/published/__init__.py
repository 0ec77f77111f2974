"""Drafters as others have published them, one file per form, and how their files are read."""
