"""What clients send: schemas of requests, the values of their fields, and reading them."""
