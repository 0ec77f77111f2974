"""Prompts: encoded, read in chunks, and with the prefixes that they share."""
