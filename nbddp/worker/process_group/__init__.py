"""The process group of a rank: form it, end its waits, and move objects to the next one."""
