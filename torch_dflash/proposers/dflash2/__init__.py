"""DFlash2: convolutions in every layer, and a selector that chains the drafts of a block."""
