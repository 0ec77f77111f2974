"""Layers that keep a recurrent state, on trees: one interface, and one file for each recurrence."""
