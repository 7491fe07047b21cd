"""What layers keep between passes: dense buffers or pages of the target, rings of a drafter."""
