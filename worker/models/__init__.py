"""Model code, and the registry that finds it."""
