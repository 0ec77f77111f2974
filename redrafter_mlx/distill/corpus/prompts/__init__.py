"""Where prompts come from: the user's files, prompt starters, and the target itself."""
