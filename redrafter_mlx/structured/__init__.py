"""Structured output: grammars, tools, and the parts of an answer."""
