"""OpenAI's API: requests and responses of its endpoints."""
