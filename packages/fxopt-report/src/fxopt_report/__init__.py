"""Reports on what passes did to a model, as a page that opens from disk, and pictures of graphs as SVG."""

from fxopt_report.changes import Changes, DrawnSite
from fxopt_report.drawn import DrawnGraph, DrawnNode
from fxopt_report.page import Report
from fxopt_report.pictures import Picture, picture
from fxopt_report.reports import report

__version__ = "0.1.0"

__all__ = ["Changes", "DrawnGraph", "DrawnNode", "DrawnSite", "Picture", "Report", "picture", "report"]
