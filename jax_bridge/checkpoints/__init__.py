"""Checkpoints read straight to the device, tensor by tensor."""
