"""One model that answers prompts: prompts, answers, conversations."""
