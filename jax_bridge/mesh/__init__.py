"""One pair on several chips: which weight is cut where, and what each chip does with its part."""
