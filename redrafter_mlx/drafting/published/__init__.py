"""Drafters as others have published them, a file for each form, and how their files are read."""
