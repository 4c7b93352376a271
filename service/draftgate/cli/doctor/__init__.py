"""`draftgate doctor`: what an operator would look at, one line each."""
