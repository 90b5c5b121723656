"""Charts of metrics: as SVG for pages, as matplotlib figures for files."""
