"""The UI in a real browser: what an operator does there, and what an analyst cannot do."""
