"""What a graph module is at one moment: snapshots, rollback, faithful copies."""
