"""Attention over the paged cache: a Pallas kernel for TPU, a jnp form for everything else."""
