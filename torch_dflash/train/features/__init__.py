"""Stage two: the target's hidden states for the answers, on disk."""
