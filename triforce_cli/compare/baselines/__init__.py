"""Other ways to generate the same text, each measured in a process of its own."""
