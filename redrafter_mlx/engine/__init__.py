"""One model that answers prompts: requests, answers, conversations."""
