"""OpenAI's API: what its endpoints take and give."""
