"""Trees of drafts: scored nodes of one or several proposers, and the best of them in preorder."""
