"""Steps of `torch_dflash` lowered to XLA programs."""
