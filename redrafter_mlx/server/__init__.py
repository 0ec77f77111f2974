"""The HTTP server: OpenAI's API over the library; the engine knows nothing of it."""
