import torch

# Threads that wait for a busy core make small tensors many times slower than one thread is.
torch.set_num_threads(1)
