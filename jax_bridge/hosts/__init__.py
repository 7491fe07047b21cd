"""Several processes that decode as one: what all agree on, and how all end when one does."""
