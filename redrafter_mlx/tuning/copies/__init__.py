"""Copies of the text: whether and how many of them are verified."""
