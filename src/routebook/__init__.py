"""Routebook."""
