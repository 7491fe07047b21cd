"""Stage two: the target's hidden states on those answers, on disk."""
