"""The pair that every installation can try: a small target and the drafter trained for it."""
