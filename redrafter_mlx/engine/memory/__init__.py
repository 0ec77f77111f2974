"""Memory: what an engine may use, and what the engines of a thread share."""
