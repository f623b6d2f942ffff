"""The places of nodes and edges in a drawing."""
