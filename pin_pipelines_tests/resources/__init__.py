"""What the contexts share."""
