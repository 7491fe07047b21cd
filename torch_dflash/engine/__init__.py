"""Who serves requests: everything on the host's side of a round."""
