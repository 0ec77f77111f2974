"""Benchmark drafted decoding against plain decoding: measure, analyse, show."""
