"""The caches of a target's layers: what they hold, and what a call writes and reads."""
