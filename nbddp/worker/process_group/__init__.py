"""The process group of a rank: made, left, made anew after a failure."""
