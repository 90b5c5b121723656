"""What a rank writes and reports, and how it is sent."""
