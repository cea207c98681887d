"""The embedded default: stack, demo and stand-ins."""
