"""A call that is read: prompts, options, logits rules, stop conditions, log-probabilities."""
