"""Charts of metrics: as SVG for pages, and as matplotlib figures for files."""
