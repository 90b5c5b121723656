"""The project of notebook 2.6: a script that survives the death of a rank under torchrun."""
