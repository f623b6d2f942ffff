"""Pictures as text, Mermaid, DOT, SVG, and data for the script of a page."""
