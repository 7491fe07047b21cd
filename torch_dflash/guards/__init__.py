"""Guards against use in a forked process and against reentry into an engine's own step."""
