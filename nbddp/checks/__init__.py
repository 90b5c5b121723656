"""What is wrong before it breaks: rules over a cell's syntax and over what the ranks say."""
