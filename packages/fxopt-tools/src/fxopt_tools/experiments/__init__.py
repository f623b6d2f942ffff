"""Which rewrite is to blame, which ones pay: a pipeline run again with rewrites left out."""
