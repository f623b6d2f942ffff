"""Pictures of graphs and reports on what passes did: text, Mermaid, DOT, SVG, and a page that opens from disk."""

from fxopt.reporting.changes import Changes, DrawnSite
from fxopt.reporting.drawn import DrawnGraph, DrawnNode
from fxopt.reporting.pictures import Picture, picture
from fxopt.reporting.reports import Report, report

__all__ = ["Changes", "DrawnGraph", "DrawnNode", "DrawnSite", "Picture", "Report", "picture", "report"]
