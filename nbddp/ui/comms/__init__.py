"""The comms by which the page talks to the kernel."""
