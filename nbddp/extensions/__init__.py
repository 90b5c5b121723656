"""Features outside of the core, each in a folder of its own."""
