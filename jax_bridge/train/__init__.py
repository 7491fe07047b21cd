"""The training step as one XLA program, over the devices of a process."""
