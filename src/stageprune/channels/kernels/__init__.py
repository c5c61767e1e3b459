"""What runs the FFN of decode rows: one small interface, several ways."""
