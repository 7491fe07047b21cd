"""What must not be crossed: process boundaries, and a step's own engine."""
