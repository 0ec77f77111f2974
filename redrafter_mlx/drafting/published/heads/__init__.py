"""Heads: small networks that read the features of the target that they were trained for."""
