"""Figures of the report: charts of the HTML page, and drawings in SVG, PDF and PNG."""
