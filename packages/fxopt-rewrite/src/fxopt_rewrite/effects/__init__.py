"""What each node reads, writes and aliases."""
