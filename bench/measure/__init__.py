"""Questions, methods, their order and their answers: what is timed and written down."""
