"""What steps cost on this machine, what is accepted, and which beam shape pays."""
