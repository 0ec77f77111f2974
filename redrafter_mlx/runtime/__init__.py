"""The machine: device, wired memory, processes, files."""
