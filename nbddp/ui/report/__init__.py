"""Reports that stay in the notebook: one builder for each view, one text and one HTML renderer."""
