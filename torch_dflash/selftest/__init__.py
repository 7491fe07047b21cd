"""What ``torch-dflash selftest`` checks on a user's own device: parity, losslessness, hidden costs, timings.

No download and no network: the models are random pairs built in code (`pairs`). What only exists on the
XLA side is in `jax_bridge.selftest`.
"""
