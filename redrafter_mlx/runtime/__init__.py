"""The machine: BLAS, device, wired memory, processes, files."""
