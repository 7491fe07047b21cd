"""Checks of ``torch-dflash selftest`` on a user's device: parity, losslessness, hidden costs, timings.

The checks need no network: `pairs` builds random models. The XLA backend is in `jax_bridge.selftest`.
"""
