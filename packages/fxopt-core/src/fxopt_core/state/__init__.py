"""The state of a graph module: snapshots, rollback, faithful copies."""
