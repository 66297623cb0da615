"""What can be asked for: one module per family of endpoints."""
