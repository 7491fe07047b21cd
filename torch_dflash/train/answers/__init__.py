"""Stage one: the target's own answers to prompts."""
