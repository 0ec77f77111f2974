"""The drafters, and the interface that all of them implement."""
