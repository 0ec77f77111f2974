"""One target on several machines: rank 0 decides; the others repeat its calls of the target."""
