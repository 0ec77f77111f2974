"""The decoding step and its loop."""
