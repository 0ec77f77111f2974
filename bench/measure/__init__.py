"""Measurement: questions, methods, the order of runs, and their recorded answers."""
