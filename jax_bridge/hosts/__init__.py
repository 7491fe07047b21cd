"""Processes of one mesh: they compare every call, and all end when one of them ends."""
