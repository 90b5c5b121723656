"""Nothing here is a test: pytest must not import these scripts, not even for doctests."""

collect_ignore_glob = ["*.py"]
