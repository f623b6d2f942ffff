"""Graph modules as rows, for pickles, archives and reproducers."""
