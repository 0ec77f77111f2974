"""Prompt starters: common first words of a request, which the target continues to a prompt.

Without them a small target asks the same few kinds of things. It can choose a subject; the starters
determine the kind of request.
"""

from __future__ import annotations

import random
from collections import Counter

PROMPT_STARTERS = (
    # Explanations
    "Explain", "Explain how", "Explain the difference between", "Explain why", "Describe",
    "Describe the process of", "What is", "What is the difference between", "What are the",
    "What causes", "What happens when", "How does", "How do", "Why do", "Why is", "How did",
    "Who was", "When did", "Discuss", "Compare", "Evaluate", "Provide an overview of",
    "Define", "Outline the history of", "Give examples of", "Tell me about", "Is it true that",
    # Writing
    "Write a short story about", "Write an email to", "Write a letter", "Write a blog post about",
    "Write an article", "Write an essay on", "Write a poem about", "Write a speech",
    "Write a review of", "Write a dialogue between", "Write a product description for",
    "Write a news report", "Compose", "Draft a", "Create an outline for", "Come up with",
    "Suggest a title for", "Describe a scene in which", "Describe a character who",
    "Write the opening paragraph of", "Continue the following story:",
    # Editing
    "Rewrite the following sentence", "Edit the following paragraph", "Correct the grammar",
    "Translate", "Paraphrase", "Simplify", "Shorten", "Summarize the following", "Convert",
    # Extraction from a text
    "Extract", "Extract the names", "Read the following passage", "Given the following text",
    "Based on the following paragraph", "Identify the", "Classify", "Find all", "List",
    "Analyze the following", "What is the main idea of", "From the data below",
    "Format the following as JSON", "Make a table of", "Rate the following reviews",
    # Mathematics and logic
    "Calculate", "Solve", "Solve for x:", "Find the value of", "What is the area of",
    "How many", "How much", "If a", "If the", "Suppose that", "Suppose you have", "A store sells",
    "A train", "A farmer has", "A student", "John has", "Maria is", "There are", "The sum of",
    "The probability that", "Which of the following", "Which is larger", "Prove that",
    "Let x be", "Given that", "Think step by step:", "True or false:", "Can you solve this riddle:",
    # Programming
    "Write a Python function", "Write a function that", "Write a program", "Write a script that",
    "Write a C++ program", "Write a JavaScript function", "Write a SQL query", "Write a class",
    "Write HTML code for", "Implement", "Implement an algorithm", "How do I use", "How can I sort",
    "Fix the bug in the following code", "What does this code do", "Given an array of",
    "Design a database", "Write unit tests for", "Create a web page", "Explain this error:",
    # Role play
    "Pretend to be", "Pretend that you are", "Imagine you are", "Imagine that", "Act as",
    "You are a", "Take the role of", "As a", "Speak like", "Answer as if you were",
    # Help and advice
    "Can you", "Could you", "Please", "Help me", "I need", "I want to", "I am", "I have", "I'm",
    "My friend", "We are planning", "Give me", "Give me advice on", "Suggest", "Recommend",
    "Plan a", "Design", "Develop a", "Propose", "Make a list of", "Create a schedule", "How can I",
    "How should I", "What should I", "What would happen if", "Should I", "Do you think",
    "What is the best way to", "Do you know", "Where can I", "Name three", "Generate",
)  # fmt: skip


def draw_starters(count: int, seed: str) -> Counter[str]:
    """Draw `count` starters at random, as evenly as possible; return how often each was drawn."""
    order = random.Random(seed).sample(PROMPT_STARTERS, len(PROMPT_STARTERS))
    return Counter(order[i % len(order)] for i in range(count))
