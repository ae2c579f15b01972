"""The command line. It deals with tokenizers, terminals and files, which the engine does not know."""
