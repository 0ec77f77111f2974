"""Loading: the target and its drafter, by name."""
