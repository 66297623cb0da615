"""HTTP in front of an engine."""
