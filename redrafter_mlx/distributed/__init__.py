"""One target on several machines: rank 0 decides, the other ranks repeat its calls of the target."""
