"""The parts of the embedded pair's recipe: `train_pair.py` puts them together."""
