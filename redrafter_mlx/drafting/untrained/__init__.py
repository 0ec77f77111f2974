"""Drafters without a network: drafts from texts, and from the target's own successors."""
