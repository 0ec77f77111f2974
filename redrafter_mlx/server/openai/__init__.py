"""OpenAI's API: requests and responses of chat completions and completions."""
