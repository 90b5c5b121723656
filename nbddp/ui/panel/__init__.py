"""A cell as a panel: live widgets while it runs, and the record that stays."""
