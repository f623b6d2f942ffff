"""Files that make a failure of a pass happen again."""
