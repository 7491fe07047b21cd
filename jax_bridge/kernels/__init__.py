"""Paged and block attention: Pallas kernels for TPU, jnp forms for everything else."""
