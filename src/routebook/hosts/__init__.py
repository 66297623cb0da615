"""Capture and ledger inside inference engines that are not ours."""
