"""Charts of metrics: drawn once, on a page as SVG or in a file as PNG."""
