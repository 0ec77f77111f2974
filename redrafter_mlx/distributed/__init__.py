"""One target on several machines: rank 0 decides, other ranks repeat its calls of the target."""
