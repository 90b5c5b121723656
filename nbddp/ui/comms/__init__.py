"""Answer widget messages from the page while a cell runs."""
