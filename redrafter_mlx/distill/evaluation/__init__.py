"""Evaluation of a drafter: on held-out texts, on given questions, and timed."""
