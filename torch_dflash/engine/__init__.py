"""The loop on the host: engines, batches, schedulers, sessions, replicas, saved states."""
