"""The panel of a cell: live widgets while it runs, and the record that replaces them."""
