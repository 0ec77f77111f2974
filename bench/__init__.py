"""Drafted decoding measured beside plain decoding: measure, analyse, show."""
