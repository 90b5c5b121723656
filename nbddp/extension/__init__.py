"""What an extension declares, which extensions are installed, and how their hooks are called."""
