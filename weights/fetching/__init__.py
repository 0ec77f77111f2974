"""From a name to files on this machine: the Hub, a PyPI wheel, other programs' downloads."""
