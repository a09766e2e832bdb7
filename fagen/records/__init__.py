"""What was tuned, where it is kept, and which of it a call gets."""
