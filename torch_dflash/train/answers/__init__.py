"""Stage one: the target's answers to prompts."""
