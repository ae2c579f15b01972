"""The command line: what the user types and sees. It knows tokenizers, terminals and files; the engine knows none."""
