"""The engine: requests become sequences, sequences share steps, steps make tokens."""
