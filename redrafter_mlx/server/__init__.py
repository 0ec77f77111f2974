"""The HTTP server: OpenAI's API over the library; the engine does not depend on it."""
