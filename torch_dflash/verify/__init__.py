"""Does block decoding compute what a target computes? Asked of its logits before any text is made."""
