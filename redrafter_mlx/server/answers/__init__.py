"""What clients get: answers as they are generated, and their replies in any API."""
