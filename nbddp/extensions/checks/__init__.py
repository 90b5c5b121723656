"""Find mistakes early: rules over the syntax of a cell, and over facts that the ranks report."""
