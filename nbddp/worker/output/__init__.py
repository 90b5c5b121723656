"""Send the output and the metrics of a rank to the controller."""
