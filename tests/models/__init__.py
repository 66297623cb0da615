"""Tests of the bundled models."""
