"""Training of drafters: the target's answers, its features, the fit, and figures on held-out prompts."""
