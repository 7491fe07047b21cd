"""Medusa: heads that each draft one position ahead from the last hidden state."""
