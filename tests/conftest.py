import torch
from trained import overfit, world

__all__ = ["overfit", "world"]  # fixtures of the session

# Threads that wait for a busy core make small tensors many times slower than one thread is.
torch.set_num_threads(1)
