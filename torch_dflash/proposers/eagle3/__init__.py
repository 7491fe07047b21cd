"""EAGLE-3: a layer that drafts token by token from the target's states."""
