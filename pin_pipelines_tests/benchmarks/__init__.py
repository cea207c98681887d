"""Measurements beside a peer or a limit; run apart from the tests."""
