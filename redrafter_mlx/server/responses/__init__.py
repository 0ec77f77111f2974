"""OpenAI's Responses API, without a store: each request holds the whole conversation."""
