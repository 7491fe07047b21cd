"""The layouts that drafters are published in: of each, config and tensors' names in z-lab's words."""
