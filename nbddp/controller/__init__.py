"""The notebook's side: decides, starts and ends ranks, and collects what they say."""
