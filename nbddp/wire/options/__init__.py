"""How an option is declared, and the options of cells."""
