"""The HTTP server: the APIs of OpenAI and Anthropic, which the engine does not depend on."""
