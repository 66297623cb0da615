"""The command `routebook`."""
