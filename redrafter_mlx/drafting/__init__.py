"""The drafters, and the interface that each of them implements."""
