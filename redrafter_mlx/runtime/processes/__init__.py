"""Processes: children, ranks of a launch, their environment, and a lock for one model."""
