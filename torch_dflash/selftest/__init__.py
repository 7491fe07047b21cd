"""Checks of ``torch-dflash selftest`` on a user's device: parity, losslessness, hidden costs, timings.

No download and no network: the models are random pairs built in code (`pairs`). The XLA backend is in
`jax_bridge.selftest`.
"""
