"""Hugging Face causal LMs as targets: traced, refused where not supported, run without weights."""
