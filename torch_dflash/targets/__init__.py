"""A Hugging Face causal LM as a target: traced, refused where it is not understood, run without weights."""
