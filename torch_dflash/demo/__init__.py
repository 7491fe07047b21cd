"""The bundled pair: a small target and a drafter trained for it."""
