"""Live weights and states: on one device, or on a mesh of them."""
