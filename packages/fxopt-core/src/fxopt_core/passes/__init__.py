"""What a pass is, and how one is run, undone and composed."""
