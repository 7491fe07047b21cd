"""The operations with two implementations: plain torch here, the lowered form in `jax_bridge.ops`."""
