"""What was applied to a graph module: marks, records, their text form, history."""
